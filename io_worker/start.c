/*
 * Everything before READY. Order matters: what the user may have got wrong is found before the
 * store is touched, and what does not fit before anything is written.
 *
 *     data        open, check, tokenize                    exit 2
 *     weights     source folder against the layout         exit 2
 *     store       open, lock (the fence), compare          exit 2, 5
 *                 absent: space, zero-fill, import, record 0   exit 3 before the first byte
 *                 ready: recover the newest commit
 *     WEIGHTS     compute weights into RAM
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "io_worker/import.h"
#include "io_worker/io.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"
#include "procs/mutant.h"

enum { ENGINE_DEPTH = 256 };

_Static_assert((int)PLAN_FORMAT_TOKENS == (int)DATA_FORMAT_TOKENS &&
                   (int)PLAN_FORMAT_TEXT == (int)DATA_FORMAT_TEXT,
               "the plan's formats are data.h's");
_Static_assert((int)PLAN_ENGINE_URING == (int)ENGINE_URING &&
                   (int)PLAN_ENGINE_SYNC == (int)ENGINE_SYNC,
               "the plan's engines are engine.h's");
static void tell(struct io *io, const char *text)
{
    size_t used = strlen(io->w->self->message), n = strlen(text);
    if (n)
        (void)snprintf(io->w->self->message + used, sizeof io->w->self->message - used, "%s%s",
                       text, text[n - 1] == '\n' ? "" : "\n");
}

int io_progress(void *context, enum store_activity activity, uint64_t done, uint64_t total)
{
    struct io *io = context;
    enum worker_activity shown = activity == STORE_ZERO_FILLING       ? ACTIVITY_ZEROING
                                 : activity == STORE_WAITING_FOR_LOCK ? ACTIVITY_FENCE
                                                                      : ACTIVITY_RECOVERING;
    if (shown == ACTIVITY_RECOVERING && io->plan->mode == PLAN_SCRUB)
        shown = ACTIVITY_SCRUBBING;
    worker_progress(io->w, shown, done, total);
    return worker_check(io->w) < 0;
}

static int data_progress(void *context, const char *path, uint64_t done, uint64_t total)
{
    struct io *io = context;
    (void)path;
    worker_progress(io->w, ACTIVITY_TOKENIZING, done, total);
    return worker_check(io->w) < 0;
}

/* -- data -- */

static const char **texts_of(const struct plan *plan, struct plan_texts texts)
{
    const char **list = calloc(texts.count + 1, sizeof *list);
    for (uint64_t i = 0; list && i < texts.count; i++)
        list[i] = plan_texts_get(plan, texts, i);
    return list;
}

static void count_evaluation(struct io *io)
{
    uint64_t n =
        data_samples(io->data, io->plan->mode == PLAN_EVALUATE ? DATA_TRAIN : DATA_VALIDATION);
    uint64_t wanted = io->plan->mode == PLAN_EVALUATE ? n : io->plan->evaluate_sequences;
    uint64_t sequences = wanted < n ? wanted : n, b = io->plan->micro_batch_size;
    atomic_store_explicit(&io->w->self->evaluate_sequences, sequences, memory_order_relaxed);
    atomic_store_explicit(&io->w->self->evaluate_microbatches, (sequences + b - 1) / b,
                          memory_order_release);
}

int start_data(struct io *io)
{
    const struct plan *plan = io->plan;
    const struct plan_data *d = &plan->data;
    char text[CONTROL_ERROR_BYTES];
    const char **train = texts_of(plan, d->train), **validation = texts_of(plan, d->validation);
    int rc = train && validation ? 0 : error_set(ERROR_FAILED, "out of memory");
    struct data_config config = {
        .train = train,
        .n_train = d->train.count,
        .validation = validation,
        .n_validation = d->validation.count,
        .val_fraction = d->val_fraction,
        .format = (enum data_format)d->format,
        .tokenizer = d->tokenizer_is_bytes ? DATA_TOKENIZER_BYTES : DATA_TOKENIZER_FILE,
        .packing = d->packing,
        .drop_overlong = d->drop_overlong,
        .shuffle = d->shuffle,
        .cache_dir = plan_text_get(plan, d->cache_dir),
        .seq_len = plan->seq_len,
        .vocab_size = plan->model.vocab_size,
        .eos_id = plan->model.n_eos ? plan->model.eos_token_id[0] : DATA_NO_EOS,
        .seed = plan->seed,
        .keep_partial = plan->mode == PLAN_EVALUATE,
    };
    if (rc == 0)
        rc = data_open(&io->data, &config, data_progress, io);
    free(train);
    free(validation);
    if (rc < 0)
        return rc;
    io->w->self->samples = data_samples(io->data, DATA_TRAIN);
    count_evaluation(io);
    (void)data_describe(io->data, text, sizeof text);
    tell(io, text);
    return 0;
}

/* -- store -- */

/* The engine moves pages to and from these frames all the time: registered, they need no pinning.
 */
static int register_frames(struct io *io)
{
    const struct segment *s = &io->w->segment;
    unsigned n = 0;
    if (io->plan->mode != PLAN_TRAIN)
        return 0;
    for (uint32_t i = 0; i < io->plan->opt_workers; i++) {
        io->regions[n++] = (struct engine_region){segment_region(s, REGION_STATE_POOL, i),
                                                  io->plan->regions[REGION_STATE_POOL].stride};
        io->regions[n++] = (struct engine_region){segment_region(s, REGION_OUT_POOL, i),
                                                  io->plan->regions[REGION_OUT_POOL].stride};
    }
    return store_register_regions(io->store, io->regions, n);
}

/* The store's files are open: its engine moves our frames from here on. */
static int adopt_engine(struct io *io)
{
    if (register_frames(io) < 0)
        return -(int)error_kind_now();
    io->engine = store_engine(io->store); /* registering opens it anew */
    engine_on_wait(io->engine, io_tell_oldest_request, io);
    tell(io, store_notice(io->store));
    log_line(LOG_INFO, "I/O engine: %s", engine_name(io->engine));
    return 0;
}

/* Opens the store; *exists: it holds a commit. */
int start_store(struct io *io, int *exists)
{
    const struct plan *plan = io->plan;
    const struct model_config *m = &plan->model;
    struct store_options options = {
        .directories = io->directories,
        .n_directories = (unsigned)plan->offload_dirs.count,
        .layout = io->layout,
        .dtype = io->dtype,
        .slots_per_page = plan->slots_per_page,
        .engine = (enum engine_kind)plan->io_engine,
        .engine_depth = ENGINE_DEPTH,
        .read_only = plan->mode == PLAN_SCRUB,
        .on_progress = io_progress,
        .progress_context = io,
    };
    memcpy(options.run, plan->run_uuid, sizeof options.run);
    /* the number tells configurations of one shape apart, in a refusal's text */
    (void)snprintf(options.model, sizeof options.model, "%s %llux%llu vocabulary %llu config %08x",
                   model_config_family(m), (unsigned long long)m->n_layers,
                   (unsigned long long)m->hidden_size, (unsigned long long)m->vocab_size,
                   (unsigned)XXH3_64bits(m, MODEL_CONFIG_COMPUTED_BYTES));
    worker_progress(io->w, ACTIVITY_RECOVERING, 0, 0);
    if (store_open(&io->store, &options) < 0)
        return -(int)error_kind_now();
    *exists = store_state_now(io->store) == STORE_READY;
    return *exists ? adopt_engine(io) : 0;
}

static void first_facts(const struct io *io, struct commit_facts *facts)
{
    memset(facts, 0, sizeof *facts);
    facts->seed = io->plan->seed;
    data_fingerprint(io->data, facts->data_position + 1);
    memcpy(&facts->config, io->plan->bits_hash, sizeof facts->config);
}

/* A position counts in the data that the run was started with. */
static int check_data(const struct io *io)
{
    uint64_t now[2];
    const uint64_t *then = io->newest.facts.data_position + 1;
    if (io->plan->mode != PLAN_TRAIN)
        return 0;
    uint64_t per_step = io->plan->microbatches * io->plan->micro_batch_size;
    if (io->newest.facts.data_position[0] != io->newest.facts.step * per_step) {
        (void)error_set(ERROR_USER,
                        "[training] micro_batch_size x gradient_accumulation_steps: step %llu "
                        "ended at sample %llu, "
                        "found %llu samples per step",
                        (unsigned long long)io->newest.facts.step,
                        (unsigned long long)io->newest.facts.data_position[0],
                        (unsigned long long)per_step);
        return error_hint("set them back, or start a new run in another run.output_dir");
    }
    data_fingerprint(io->data, now);
    if (memcmp(then, now, sizeof now) == 0)
        return 0;
    (void)error_set(
        ERROR_USER,
        "[data] train: the contents of the files are not those the run was started with: expected "
        "fingerprint %016llx%016llx, found %016llx%016llx",
        (unsigned long long)then[1], (unsigned long long)then[0], (unsigned long long)now[1],
        (unsigned long long)now[0]);
    return error_hint("restore the files, or start a new run in another run.output_dir");
}

/* Version 0 of one page: into slot 0 and, without reading it again, into WEIGHTS. */
static int import_one(struct io *io, struct import *im, void *image, uint64_t page)
{
    struct page_image_layout layout;
    struct page_identity identity;
    struct io_request request = {0};
    store_page_layout(io->store, page, &layout);
    store_page_identity(io->store, page, 0, &identity);
    void *weights = page_image_part(image, &layout, PART_WEIGHTS);
    void *residual = io->plan->bf16 ? page_image_part(image, &layout, PART_RESIDUAL) : NULL;
    if (import_page(im, &io->layout->pages[page], weights, residual) < 0)
        return -(int)error_kind_now();
    page_image_seal(image, &layout, &identity, PAGE_ZERO);
    request.buffer = image;
    request.bytes = page_image_bytes(&layout, PAGE_ZERO);
    store_request_page(io->store, &request, IO_WRITE, page, 0);
    if (engine_run(io->engine, &request) < 0)
        return -(int)error_kind_now();
    page_entry_from_image(&io->tables.complete[page], image, 0);
    memcpy(segment_frame(&io->w->segment, REGION_WEIGHTS_POOL, 0, (uint32_t)page), weights,
           pager_weights_bytes(io, page));
    io->weights_version[page] = 0;
    io->weights_hash[page] = io->tables.complete[page].digest[PART_WEIGHTS].low;
    fault_point(FAULT_io_import_page);
    return 0;
}

static int import_all(struct io *io, struct import *im)
{
    void *image = segment_frame(&io->w->segment, REGION_STATE_POOL, 0, 0);
    uint64_t done = 0, bytes = io->plan->bf16 ? 2 : 4;
    for (uint64_t p = 0; p < io->layout->n_pages; p++) {
        worker_progress(io->w, ACTIVITY_IMPORTING, done * bytes, io->layout->elements * bytes);
        if (worker_check(io->w) < 0 || import_one(io, im, image, p) < 0)
            return -(int)error_kind_now();
        done += io->layout->pages[p].elements;
    }
    return 0;
}

static int open_source(struct io *io, struct import **im)
{
    struct import_config config = {
        .layout = io->layout,
        .folder = io->plan->weights == PLAN_WEIGHTS_RANDOM
                      ? NULL
                      : plan_text_get(io->plan, io->plan->model_dir),
        .seed = io->plan->seed,
    };
    return import_open(im, &config);
}

int start_validate(struct io *io)
{
    struct import *im = NULL;
    int rc = open_source(io, &im);
    import_close(im);
    return rc;
}

static int create(struct io *io)
{
    struct import *im = NULL;
    struct commit_facts facts;
    int rc = open_source(io, &im);
    if (rc == 0)
        rc = store_preflight(io->store);
    if (rc == 0)
        rc = store_create(io->store);
    if (rc == 0)
        rc = adopt_engine(io);
    if (rc == 0)
        rc = commit_open(&io->commit, io->store);
    if (rc == 0)
        rc = import_all(io, im);
    first_facts(io, &facts);
    if (rc == 0)
        rc = commit_run(io->commit, &facts, io->tables.complete, &io->newest);
    if (rc == 0) {
        fault_point(FAULT_io_before_mark_ready);
        rc = store_mark_ready(io->store);
        fault_point(FAULT_io_after_mark_ready);
    }
    import_close(im);
    if (rc == -ERROR_USER || rc == -ERROR_FIT)
        store_discard(io->store); /* the launcher undoes the run directory likewise */
    return rc;
}

/* Compute weights of the newest commit. Recovery has just verified the bytes on disk; this is
 * another read of them, so it is checked too. */
static int load_from_store(struct io *io)
{
    uint64_t done = 0, bytes = io->plan->bf16 ? 2 : 4;
    for (uint64_t p = 0; p < io->layout->n_pages; p++) {
        worker_progress(io->w, ACTIVITY_LOADING, done * bytes, io->layout->elements * bytes);
        if (worker_check(io->w) < 0 || takeover_load(io, p) < 0)
            return -(int)error_kind_now();
        done += io->layout->pages[p].elements;
    }
    return 0;
}

/* Without a store (eval and generate on a Hugging Face folder). */
static int load_from_folder(struct io *io)
{
    struct import *im;
    struct page_image_layout layout;
    if (open_source(io, &im) < 0)
        return -(int)error_kind_now();
    int rc = 0;
    for (uint64_t p = 0; p < io->layout->n_pages && rc == 0; p++) {
        page_image_layout(&layout, io->dtype, io->layout->pages[p].elements);
        void *frame = segment_frame(&io->w->segment, REGION_WEIGHTS_POOL, 0, (uint32_t)p);
        void *residual =
            io->plan->bf16 ? page_image_part(io->exporter.image, &layout, PART_RESIDUAL) : NULL;
        rc = import_page(im, &io->layout->pages[p], frame, residual);
        io->weights_hash[p] = page_image_digest(frame, pager_weights_bytes(io, p)).low;
        worker_progress(io->w, ACTIVITY_LOADING, p, io->layout->n_pages);
        if (rc == 0)
            rc = worker_check(io->w);
    }
    import_close(im);
    return rc;
}

static int recover(struct io *io)
{
    uint64_t fell_back = 0;
    char text[160];
    if (store_recover(io->store, &io->newest, io->tables.complete, &fell_back) < 0 ||
        check_data(io) < 0)
        return -(int)error_kind_now();
    if (fell_back) {
        (void)snprintf(text, sizeof text, "commit %llu is damaged; resuming from the one before it",
                       (unsigned long long)fell_back);
        tell(io, text);
        log_line(LOG_WARN, "%s", text);
    }
    /* config.toml in the run directory refuses this; it may have been lost or edited */
    if (io->plan->mode == PLAN_TRAIN && memcmp(&io->newest.facts.config, io->plan->bits_hash,
                                               sizeof io->newest.facts.config) != 0) {
        const char *changed =
            "the configuration keys that determine bits are not those the run was started with: "
            "from here on bits differ from an undisturbed run";
        tell(io, changed);
        log_line(LOG_WARN, "%s", changed);
    }
    if (commit_open(&io->commit, io->store) < 0)
        return -(int)error_kind_now();
    commit_resume(io->commit, &io->newest);
    if (fell_back && io->plan->mode == PLAN_TRAIN && !mutant(MUTANT_given_up_comes_back)) {
        commit_give_up(io->commit, fell_back);
        const struct commit_facts facts = io->newest.facts;
        if (commit_run(io->commit, &facts, io->tables.complete, &io->newest) < 0)
            return -(int)error_kind_now();
    }
    fault_point(FAULT_io_recovered);
    return load_from_store(io);
}

/* In the place of an io_worker that died: only what it left in shared memory is different. */
static int take_over(struct io *io)
{
    if (takeover_adopt(io) < 0 || check_data(io) < 0 || commit_open(&io->commit, io->store) < 0)
        return -(int)error_kind_now();
    commit_resume(io->commit, &io->newest);
    return 0;
}

int start_weights(struct io *io)
{
    int exists = 0, rc;
    if (io->plan->weights == PLAN_WEIGHTS_FOLDER && io->plan->mode != PLAN_TRAIN)
        return load_from_folder(io);
    if ((rc = start_store(io, &exists)) < 0)
        return rc;
    if (takeover_due(io))
        return exists ? take_over(io)
                      : error_set(ERROR_DAMAGED, "%s: the store of the worker that died is gone",
                                  io->directories[0]);
    if (exists && io->plan->resume_never)
        return error_set(ERROR_USER, "[run] resume = \"never\", but %s holds a commit of this run",
                         io->directories[0]);
    if (!exists && io->plan->store_expected) {
        (void)error_set(
            ERROR_USER,
            "%s: no store with a commit there, though %s/metrics.jsonl has steps of this run",
            io->directories[0], plan_text_get(io->plan, io->plan->output_dir));
        return error_hint("is the file system of offload_dir mounted? `mtlaunch clean %s` first "
                          "starts the run anew",
                          plan_text_get(io->plan, io->plan->output_dir));
    }
    if (!exists && io->plan->mode != PLAN_TRAIN)
        return error_set(ERROR_USER, "%s: no commit yet", io->directories[0]);
    if ((rc = exists ? recover(io) : create(io)) < 0)
        return rc;
    /* recovery read every slot; an import is read back by the first step, or before its skip */
    page_tables_start(&io->tables, &io->newest.facts, io->newest.state_hash, exists);
    io->w->self->store_bytes = store_bytes_needed(io->layout, io->dtype, io->plan->slots_per_page);
    return 0;
}

int start_open(struct io *io)
{
    const struct segment *s = &io->w->segment;
    uint64_t n = io->layout->n_pages;
    io->directories = texts_of(io->plan, io->plan->offload_dirs);
    io->weights_version = calloc(n, sizeof *io->weights_version);
    io->weights_hash = calloc(n, sizeof *io->weights_hash);
    io->weights_lent = calloc(n, sizeof *io->weights_lent);
    io->readback_bits = calloc(readback_words(n), sizeof *io->readback_bits);
    if (!io->directories || !io->weights_version || !io->weights_hash || !io->weights_lent ||
        !io->readback_bits)
        return error_set(ERROR_FAILED, "out of memory for %llu pages", (unsigned long long)n);
    io->readback.bits = io->readback_bits;
    io->readback.n_pages = n;
    page_tables_open(&io->tables, segment_region(s, REGION_PAGE_TABLE, 0), n);
    return read_back_open(io) < 0 ? -(int)error_kind_now() : exporter_open(io);
}

void start_close(struct io *io)
{
    read_back_close(io);
    exporter_close(io);
    commit_close(io->commit);
    store_close(io->store);
    data_close(io->data);
    free(io->directories);
    free(io->weights_version);
    free(io->weights_hash);
    free(io->weights_lent);
    free(io->readback_bits);
}
