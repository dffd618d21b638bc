#include "launcher/plan_build.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "ipc/page_image.h"
#include "launcher/limits.h"
#include "launcher/machine.h"
#include "launcher/prompts.h"
#include "launcher/size.h"
#include "launcher/tokenizing.h"
#include "model/tokenizer_bytes.h"
#include "model/tokenizer_file.h"
#include "model/visits.h"
#include "procs/check.h"
#include "procs/error.h"

enum {
    PLAN_CAPACITY_BYTES = 8 << 20, /* struct and texts */
    STATE_FRAMES_MIN = 2,          /* per opt_worker: one in use, one being read */
    STATE_FRAMES_PREDICT = 6,      /* what "predict" may use */
    STATE_FRAMES_MAX = 64,
    RING_DEPTH_MAX = 1 << 16,
    STEP_TOKENS_LOG2_MAX =
        40,             /* per step: their ids alone take 16 TB; keeps every sum below in 64 bits */
    THREADS_MAX = 1024, /* what the CPU device takes; also the limit of memory.threads */
    PAGE_ELEMENTS_HINT_MIN = 1 << 18,  /* smaller pages cost more requests than they save */
    CODE_BYTES_PER_PROCESS = 24 << 20, /* stacks, libraries' data, BLAS buffers: not pools */
};

static uint64_t power_of_two(uint64_t n)
{
    uint64_t p = 2;
    while (p < n)
        p *= 2;
    return p;
}

static int tokenizer_is_bytes(const struct config *c)
{
    return strcmp(c->model_tokenizer, "bytes") == 0;
}

/* Can the model take every id that its tokenizer makes? A folder without one has only token shards.
 */
static int check_tokenizer(const struct config *c, const struct model_config *model)
{
    char path[LAUNCHER_PATH_BYTES];
    if (tokenizer_is_bytes(c))
        return 0;
    if (*c->model_tokenizer)
        return tokenizer_file_check(c->model_tokenizer, model->vocab_size) < 0
                   ? error_wrap("[model] tokenizer")
                   : 0;
    (void)snprintf(path, sizeof path, "%s/tokenizer.json", c->model_path);
    return access(path, F_OK) < 0 ? 0 : tokenizer_file_check(path, model->vocab_size);
}

int plan_load_model(const struct config *config, struct model_layout *layout)
{
    struct model_config model;
    if (access(config->model_path, F_OK) < 0) {
        (void)error_set(ERROR_USER, "[model] path: %s: %s", config->model_path, strerror(errno));
        return error_hint("expected a Hugging Face folder with config.json; a relative path is "
                          "relative to the run file");
    }
    if (model_config_load(&model, config->model_path) < 0 || check_tokenizer(config, &model) < 0 ||
        model_layout_init(layout, &model, config->memory_page_elements) < 0)
        return -(int)error_kind_now();
    return 0;
}

/* -- tokens -- */

/* What the byte tokenizer cannot be used for. */
static int check_bytes(const struct config *c)
{
    if (!tokenizer_is_bytes(c) ||
        (c->data_format != CONFIG_FORMAT_CHAT && c->data_format != CONFIG_FORMAT_PROMPT_COMPLETION))
        return 0;
    (void)error_set(ERROR_USER,
                    "[data] format = \"%s\": instruction data needs a tokenizer.json, "
                    "[model] tokenizer is \"bytes\"",
                    c->data_format == CONFIG_FORMAT_CHAT ? "chat" : "prompt-completion");
    return error_hint("the tokenizer.json and chat template of an instruction-tuned model will do");
}

static int check_model(const struct config *c, const struct model_layout *layout)
{
    const struct model_config *m = &layout->config;
    if (check_bytes(c) < 0)
        return -(int)error_kind_now();
    if (tokenizer_is_bytes(c) && m->vocab_size < TOKENIZER_BYTES_VOCABULARY)
        return error_set(
            ERROR_USER,
            "[model] tokenizer = \"bytes\": needs vocab_size of at least %d, %s/config.json "
            "says %llu",
            TOKENIZER_BYTES_VOCABULARY, c->model_path, (unsigned long long)m->vocab_size);
    if (c->training_seq_len < 2)
        return error_set(ERROR_USER, "[training] seq_len: expected at least 2, found %llu",
                         (unsigned long long)c->training_seq_len);
    if (c->training_seq_len > m->max_position) {
        (void)error_set(ERROR_USER,
                        "[training] seq_len = %llu: the model has %llu positions "
                        "(max_position_embeddings)",
                        (unsigned long long)c->training_seq_len,
                        (unsigned long long)m->max_position);
        return error_hint("shorten seq_len, or extend the model with rope_scaling");
    }
    return 0;
}

static int check_step_size(const struct config *c)
{
    uint64_t tokens = c->training_seq_len * c->training_micro_batch_size; /* at most 2^44 */
    if (tokens <= ((uint64_t)1 << STEP_TOKENS_LOG2_MAX) / c->training_gradient_accumulation_steps)
        return 0;
    (void)error_set(
        ERROR_FIT,
        "[training] seq_len %llu x micro_batch_size %llu x gradient_accumulation_steps %llu: "
        "expected at "
        "most 2^%d tokens per step",
        (unsigned long long)c->training_seq_len, (unsigned long long)c->training_micro_batch_size,
        (unsigned long long)c->training_gradient_accumulation_steps, STEP_TOKENS_LOG2_MAX);
    return error_hint("a step's token ids are kept in RAM; make the batch smaller");
}

/* -- pools -- */

static uint64_t largest_page(const struct model_layout *layout)
{
    uint64_t most = 0;
    for (uint64_t p = 0; p < layout->n_pages; p++)
        if (layout->pages[p].elements > most)
            most = layout->pages[p].elements;
    return most;
}

static void set_pool(struct plan *plan, enum region_id pool, uint64_t frame_bytes, uint64_t frames)
{
    plan->pools[pool] = (struct plan_pool){frame_bytes, plan_frame_stride(frame_bytes), frames};
}

static uint64_t state_frames(const struct plan *plan, uint64_t own_pages)
{
    uint64_t n = plan->prefetch ? plan->prefetch + 1 : STATE_FRAMES_PREDICT;
    if (n > own_pages)
        n = own_pages;
    if (n > STATE_FRAMES_MAX)
        n = STATE_FRAMES_MAX;
    return n < STATE_FRAMES_MIN ? STATE_FRAMES_MIN : n;
}

static void set_pools(struct plan *plan, const struct model_layout *layout)
{
    uint64_t elements = largest_page(layout), pages = layout->n_pages;
    struct page_image_layout image;
    page_image_layout(&image, plan->bf16 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, elements);
    if (plan->mode == PLAN_TRAIN || plan->mode == PLAN_EVALUATE)
        set_pool(plan, REGION_MICROBATCH_POOL,
                 microbatch_bytes(plan->micro_batch_size, plan->seq_len), plan->microbatches);
    if (plan->mode == PLAN_TRAIN || plan->mode == PLAN_EVALUATE || plan->mode == PLAN_GENERATE)
        set_pool(plan, REGION_WEIGHTS_POOL, elements * (plan->bf16 ? 2 : 4), pages);
    if (plan->mode != PLAN_TRAIN)
        return;
    uint64_t own = pages / plan->opt_workers + 1;
    set_pool(plan, REGION_GRADIENT_POOL, elements * sizeof(float), pages);
    set_pool(plan, REGION_STATE_POOL, image.bytes, state_frames(plan, own));
    set_pool(plan, REGION_OUT_POOL, image.bytes, state_frames(plan, own));
}

/* Every ring is as deep as what can be lent through it, so that a worker waits only for frames;
 * WEIGHTS lends one frame to several visits and is as deep as two walks over the pages. */
static void set_rings(struct plan *plan, const struct model_layout *layout)
{
    for (int r = 0; r < RING_COUNT; r++) {
        uint64_t n = plan->pools[topology_rings[r].pool].frames;
        if (topology_rings[r].pool == REGION_WEIGHTS_POOL)
            n = 2 * layout->n_pages;
        if (r == RING_WEIGHTS && n > RING_DEPTH_MAX)
            n = RING_DEPTH_MAX;
        plan->ring_depth[r] = power_of_two(n);
    }
}

/* -- texts -- */

/* Token files tell what they are. */
static uint32_t data_format(const struct launcher *l)
{
    if (l->tokenized.train.count)
        return PLAN_FORMAT_AUTO;
    return l->config.data_format == CONFIG_FORMAT_TEXT     ? PLAN_FORMAT_TEXT
           : l->config.data_format == CONFIG_FORMAT_TOKENS ? PLAN_FORMAT_TOKENS
                                                           : PLAN_FORMAT_AUTO;
}

static int add_data(struct plan *plan, const struct launcher *l)
{
    const struct config *c = &l->config;
    struct plan_data *d = &plan->data;
    char cache[LAUNCHER_PATH_BYTES];
    tokenizing_cache(c, cache);
    int tokenized = l->tokenized.train.count > 0;
    const struct config_strings *train = tokenized ? &l->tokenized.train : &c->data_train;
    const struct config_strings *validation =
        tokenized ? &l->tokenized.validation : &c->data_validation;
    d->val_fraction = c->data_val_fraction;
    d->format = data_format(l);
    d->packing = c->data_packing;
    d->shuffle = c->data_shuffle;
    d->drop_overlong = c->data_overlong == CONFIG_OVERLONG_DROP;
    d->tokenizer_is_bytes = (uint32_t)tokenizer_is_bytes(c);
    if (plan_texts_add(plan, PLAN_CAPACITY_BYTES, (const char *const *)train->items, train->count,
                       &d->train) < 0 ||
        plan_texts_add(plan, PLAN_CAPACITY_BYTES, (const char *const *)validation->items,
                       validation->count, &d->validation) < 0 ||
        plan_text_add(plan, PLAN_CAPACITY_BYTES, c->model_tokenizer, &d->tokenizer) < 0 ||
        plan_text_add(plan, PLAN_CAPACITY_BYTES, cache, &d->cache_dir) < 0)
        return -(int)error_kind_now();
    return 0;
}

static int add_directories(struct plan *plan, const struct config *c,
                           const struct plan_request *request)
{
    char store[LAUNCHER_PATH_BYTES], exports[LAUNCHER_PATH_BYTES], logs[LAUNCHER_PATH_BYTES];
    const char *own_store[] = {store};
    const char *const *stores = (const char *const *)c->memory_offload_dir.items;
    (void)snprintf(store, sizeof store, "%s/store", c->run_output_dir);
    (void)snprintf(exports, sizeof exports, "%s/export", c->run_output_dir);
    (void)snprintf(logs, sizeof logs, "%s/logs", c->run_output_dir);
    uint64_t n = c->memory_offload_dir.count;
    if (plan_texts_add(plan, PLAN_CAPACITY_BYTES, n ? stores : own_store, n ? n : 1,
                       &plan->offload_dirs) < 0 ||
        plan_text_add(plan, PLAN_CAPACITY_BYTES, c->run_output_dir, &plan->output_dir) < 0 ||
        plan_text_add(plan, PLAN_CAPACITY_BYTES, request->mode == PLAN_TRAIN ? logs : "",
                      &plan->log_dir) < 0 ||
        plan_text_add(plan, PLAN_CAPACITY_BYTES, c->model_path, &plan->model_dir) < 0 ||
        plan_text_add(plan, PLAN_CAPACITY_BYTES,
                      request->export_dir ? request->export_dir : exports,
                      &plan->checkpoint.export_dir) < 0)
        return -(int)error_kind_now();
    return 0;
}

static int add_prompts(struct plan *plan, const struct plan_request *request)
{
    struct plan_generate *g = &plan->generate;
    const struct prompts *p = request->encoded;
    if (request->n_prompts == 0)
        return 0;
    CHECK(p != NULL && p->n == request->n_prompts);
    if (plan_texts_add(plan, PLAN_CAPACITY_BYTES, request->prompts, p->n, &g->prompts) < 0 ||
        plan_ids_add(plan, PLAN_CAPACITY_BYTES, p->ids, (uint64_t)p->first[p->n], &g->prompt_ids) <
            0)
        return -(int)error_kind_now();
    return plan_ids_add(plan, PLAN_CAPACITY_BYTES, p->first, p->n + 1, &g->prompt_first);
}

static int add_texts(struct plan *plan, const struct launcher *l,
                     const struct plan_request *request)
{
    const struct config *c = &l->config;
    plan->bytes = sizeof *plan;
    if (add_directories(plan, c, request) < 0 || add_data(plan, l) < 0 ||
        plan_texts_add(plan, PLAN_CAPACITY_BYTES, (const char *const *)c->optimizer_no_decay.items,
                       c->optimizer_no_decay.count, &plan->no_decay) < 0 ||
        add_prompts(plan, request) < 0)
        return -(int)error_kind_now();
    return 0;
}

/* -- numbers -- */

static int32_t export_dtype(const struct config *c)
{
    switch (c->checkpoint_export_dtype) {
    case CONFIG_EXPORT_DTYPE_FLOAT32:
        return DTYPE_F32;
    case CONFIG_EXPORT_DTYPE_BFLOAT16:
        return DTYPE_BF16;
    case CONFIG_EXPORT_DTYPE_FLOAT16:
        return DTYPE_F16;
    case CONFIG_EXPORT_DTYPE_AUTO:
        break;
    }
    return -1;
}

static void set_training(struct plan *plan, const struct config *c)
{
    plan->seed = c->run_seed;
    plan->seq_len = c->training_seq_len;
    plan->micro_batch_size = c->training_micro_batch_size;
    plan->microbatches = c->training_gradient_accumulation_steps;
    plan->checkpoint_every = c->training_activation_checkpointing == CONFIG_AUTO
                                 ? PLAN_CHECKPOINT_AUTO
                                 : (uint32_t)c->training_activation_checkpointing;
    plan->evaluate_sequences = c->eval_sequences;
    plan->resume_never = c->run_resume == CONFIG_RESUME_NEVER && plan->generation == 1;
    plan->checkpoint.export_interval = c->checkpoint_export_interval;
    plan->checkpoint.keep = c->checkpoint_keep;
    plan->checkpoint.export_dtype = export_dtype(c);
}

/* Hashing lent frames costs what docs/measured says; MTLAUNCH_FRAME_HASHES=0 is how that was
 * measured. The redo of a spike compares them. */
static uint32_t frame_hashes(const struct config *c)
{
    const char *text = getenv("MTLAUNCH_FRAME_HASHES");
    return !text || strcmp(text, "0") != 0 || c->training_spike == CONFIG_SPIKE_REDO;
}

static void set_machine(struct plan *plan, const struct config *c)
{
    plan->bf16 = c->model_dtype == CONFIG_DTYPE_BFLOAT16;
    plan->page_elements = c->memory_page_elements;
    plan->weights = c->model_init == CONFIG_INIT_RANDOM ? PLAN_WEIGHTS_RANDOM : PLAN_WEIGHTS_FOLDER;
    plan->opt_workers =
        c->optimizer_workers == CONFIG_AUTO ? machine_numa_nodes() : (uint32_t)c->optimizer_workers;
    if (plan->opt_workers > OPT_WORKERS_MAX)
        plan->opt_workers = OPT_WORKERS_MAX;
    plan->threads =
        c->memory_threads == CONFIG_AUTO ? machine_cores() : (uint32_t)c->memory_threads;
    if (plan->threads > THREADS_MAX)
        plan->threads = THREADS_MAX;
    plan->slots_per_page = c->memory_verify_writes ? 3 : 2;
    plan->io_engine = (uint32_t)c->memory_io_engine; /* same order as enum engine_kind */
    plan->recompute = c->optimizer_recompute;
    plan->prefetch = c->memory_prefetch == CONFIG_AUTO ? 0 : c->memory_prefetch;
    plan->log_bytes_max = c->log_max_size;
    plan->frame_hashes = frame_hashes(c);
}

static int set_identity(struct plan *plan, const struct launcher *l)
{
    uint8_t random[16];
    struct config_hash hash = config_bits_hash(&l->config);
    plan->magic = PLAN_MAGIC;
    plan->layout_version = PLAN_LAYOUT_VERSION;
    memcpy(plan->run_uuid, l->run.id, sizeof plan->run_uuid);
    memcpy(plan->bits_hash, &hash, sizeof plan->bits_hash);
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return error_set(ERROR_FAILED, "getrandom: %s", strerror(errno));
    for (size_t i = 0; i < sizeof random; i++)
        (void)snprintf(plan->token + 2 * i, 3, "%02x", random[i]);
    return 0;
}

/* Elements of all frames of weights, which are as large as the largest page each. */
static uint64_t framed_elements(const struct model_layout *layout, uint64_t page_elements)
{
    uint64_t pages = 0, largest = 0;
    for (uint32_t i = 0; i < layout->n_layers; i++) {
        uint64_t elements = layout->layers[i].elements;
        uint64_t page = elements < page_elements ? elements : page_elements;
        pages += (elements + page_elements - 1) / page_elements;
        largest = page > largest ? page : largest;
    }
    return pages * largest;
}

/* A layer's last page is short, its frame is not: of many small layers (experts), much is lost.
 * Halves the page while that gains a tenth of all; 0 when nothing is to be gained. */
static uint64_t better_page_elements(const struct model_layout *layout)
{
    uint64_t now = framed_elements(layout, layout->page_elements), best = 0;
    for (uint64_t page = layout->page_elements / 2; page >= PAGE_ELEMENTS_HINT_MIN; page /= 2)
        if (framed_elements(layout, page) < now - now / 10) {
            now = framed_elements(layout, page);
            best = page;
        }
    return best;
}

static int hint_of_budget(const struct plan *plan, const struct model_layout *layout)
{
    uint64_t page = better_page_elements(layout);
    if (plan->mode != PLAN_TRAIN || page == 0)
        return error_hint("this build keeps weights and gradients in RAM: a budget smaller than "
                          "the model needs paging of both");
    uint64_t saved =
        (framed_elements(layout, layout->page_elements) - framed_elements(layout, page)) *
        (plan->bf16 ? 6 : 8);
    char text[SIZE_TEXT_BYTES_MAX];
    return error_hint("a run that begins with [memory] page_elements = %llu needs %s less: its "
                      "layers fill pages of %llu badly",
                      (unsigned long long)page, size_format(text, sizeof text, saved),
                      (unsigned long long)layout->page_elements);
}

/* What the budget leaves for the device after the segment and the processes themselves. */
static int set_budget(struct plan *plan, const struct config *c, const struct model_layout *layout)
{
    char shared[SIZE_TEXT_BYTES_MAX], other[SIZE_TEXT_BYTES_MAX], limit[SIZE_TEXT_BYTES_MAX];
    uint64_t budget = c->memory_max_ram == CONFIG_AUTO ? machine_ram_budget() : c->memory_max_ram;
    uint64_t processes = (uint64_t)(plan->opt_workers + 3) * CODE_BYTES_PER_PROCESS;
    uint64_t exporter = 2 * plan->pools[REGION_OUT_POOL].frame_bytes; /* and the read-back page */
    uint64_t fixed = plan->segment_bytes + processes + exporter;
    if (fixed >= budget) {
        (void)error_set(ERROR_FIT,
                        "[memory] max_ram: the run needs %s of shared memory and %s for its "
                        "processes before any device buffer; the budget is %s",
                        size_format(shared, sizeof shared, plan->segment_bytes),
                        size_format(other, sizeof other, processes + exporter),
                        size_format(limit, sizeof limit, budget));
        return hint_of_budget(plan, layout);
    }
    plan->device_bytes_max = budget - fixed;
    return 0;
}

/* Between two commits, the newest commit, the newest complete version and the one being formed lie
 * in slots of their own. */
static int check_durability(const struct config *c)
{
    if (c->memory_verify_writes || c->memory_durability == 1)
        return 0;
    (void)error_set(ERROR_FIT,
                    "[memory] durability = %llu needs three slots per page, verify_writes = false "
                    "leaves two",
                    (unsigned long long)c->memory_durability);
    return error_hint("set verify_writes = true, or durability = \"step\"");
}

int plan_check_model(const struct launcher *l)
{
    return check_model(&l->config, &l->layout);
}

int plan_build(struct plan **out, const struct launcher *l, const struct plan_request *request)
{
    const struct config *c = &l->config;
    struct plan *plan = calloc(1, PLAN_CAPACITY_BYTES);
    if (!plan)
        return error_set(ERROR_FAILED, "out of memory");
    plan->mode = request->mode;
    plan->generation = request->generation;
    plan->model = l->layout.config;
    set_machine(plan, c);
    if (request->weights_from_store && plan->mode != PLAN_EXPORT)
        plan->weights = PLAN_WEIGHTS_STORE;
    set_training(plan, c);
    plan->generate.max_new_tokens = request->max_new_tokens;
    plan->generate.temperature = request->temperature;
    plan->generate.top_p = request->top_p;
    plan->generate.seed = request->sampling_seed;
    int rc = check_durability(c);
    if (rc == 0)
        rc = check_model(c, &l->layout);
    if (rc == 0 && plan->mode == PLAN_TRAIN)
        rc = model_config_check_training(&plan->model, c->model_path);
    if (rc == 0)
        rc = check_step_size(c);
    if (rc == 0)
        rc = set_identity(plan, l);
    if (rc == 0)
        rc = add_texts(plan, l, request);
    if (rc == 0) {
        set_pools(plan, &l->layout);
        set_rings(plan, &l->layout);
        plan_place_regions(plan, &l->layout);
        rc = set_budget(plan, c, &l->layout);
        if (rc == 0)
            rc = limits_check(plan);
    }
    if (rc < 0) {
        free(plan);
        return rc;
    }
    *out = plan;
    return 0;
}
