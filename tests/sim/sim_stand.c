/*
 * Stand-ins: what is not control. A device whose compute mixes the hash of the weights, of the
 * microbatch and of what came before into the gradient, so that one wrong, stale or mixed byte
 * changes everything after it; data that is a function of the sample's number; an import that is a
 * function of the seed; an export that is a hash.
 *
 * The device copies asynchronously, as a GPU does: what was enqueued moves at synchronize(), not
 * before, so a frame given back too early is seen.
 */
#define PROCS_ERROR_BODIES
#include "tests/sim/sim.h"

#include "gpu_worker/gpu.h"
#include "io_worker/data.h"
#include "io_worker/export.h"
#include "io_worker/import.h"
#include "io_worker/io.h"
#include "ipc/page_image.h"
#include "launcher/metrics.h"
#include "launcher/plan_build.h"
#include "launcher/progress.h"
#include "launcher/samples.h"
#include "launcher/step_line.h"
#include "model/split.h"
#include "procs/log.h"
#include "procs/printable.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum {
    HIDDEN = 4,
    VOCABULARY = 4,
    SEQ_LEN = 2,
    PAGE_ELEMENTS = 128,
    TRAINING_SAMPLES = 1000,
    VALIDATION_SAMPLES = 5,
    COPIES_MAX = 64,
};

struct sim_config config;
struct model_layout sim_layout;

uint64_t sim_hash(uint64_t a, uint64_t b)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u ^ (b + 0x2545f4914f6cdd1du);
    z = (z ^ (z >> 29)) * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 32);
}

/* -- the configuration of a batch of schedules -- */

int real_model_layout_init(struct model_layout *layout, const struct model_config *c,
                           uint64_t page_elements);
void real_model_layout_destroy(struct model_layout *layout);

int model_layout_init(struct model_layout *layout, const struct model_config *c,
                      uint64_t page_elements)
{
    (void)c;
    (void)page_elements;
    *layout = sim_layout; /* the same for all, never changed */
    return 0;
}

void model_layout_destroy(struct model_layout *layout)
{
    (void)layout;
}

void sim_stand_configure(uint64_t seed)
{
    uint64_t r = sim_hash(seed, 77);
    config = (struct sim_config){
        .seed = seed,
        .steps = 3 + r % 4,
        .blocks = 1 + (r >> 4) % 2,
        .microbatches = 1 + (r >> 6) % 2,
        .prefetch = (r >> 8) % 4,
        .opt_workers = (r >> 12) % 8 ? 2 : 1,
        .directories = 1 + (uint32_t)((r >> 16) % 2),
        .slots = (r >> 20) % 5 ? 3 : 2,
        .bf16 = (uint32_t)((r >> 24) % 2),
        .tied = (uint32_t)((r >> 26) % 2),
        .checkpoint_every = (uint32_t)((r >> 28) % 3),
        .export_interval = (r >> 32) % 3,
        .eval_interval = (r >> 36) % 4 == 0 ? 2 : 0,
        .frame_hashes = (r >> 48) % 2,
    };
    uint64_t s = sim_hash(seed, 78);
    config.prompts = s % 3 == 0;
    config.in_epochs = (s >> 8) % 4 == 0;
    config.no_watchdog = (s >> 16) % 8 == 0;
    config.spike = (s >> 24) % 4 == 0   ? CONFIG_SPIKE_REDO
                   : (s >> 24) % 4 == 1 ? CONFIG_SPIKE_SKIP
                                        : CONFIG_SPIKE_OFF;
    config.frame_hashes |= config.spike == CONFIG_SPIKE_REDO;
    config.experts = (r >> 56) % 4 == 0 ? 2 : 0;
    config.expert_size = (r >> 60) % 2 ? HIDDEN : 4 * HIDDEN; /* one page, or two */
    config.durability = config.slots == 3 && (r >> 50) % 3 == 0 ? 2 + (r >> 52) % 2 : 1;
    config.microbatch_frames = 1 + (r >> 40) % config.microbatches;
    for (uint64_t step = 1; step <= config.steps; step++)
        if (sim_hash(seed, step) % 6 == 0)
            config.skip_mask |= (uint64_t)1 << step;
    struct model_config m = {.vocab_size = VOCABULARY,
                             .hidden_size = HIDDEN,
                             .intermediate_size = HIDDEN,
                             .n_layers = config.blocks,
                             .n_heads = 1,
                             .n_kv_heads = 1,
                             .head_dim = HIDDEN,
                             .max_position = 64,
                             .n_experts = config.experts,
                             .experts_per_token = 1,
                             .expert_size = config.expert_size,
                             .sparse = {config.experts ? 1 : 0}, /* the first block */
                             .tie_word_embeddings = config.tied,
                             .bos_token_id = -1,
                             .pad_token_id = -1};
    real_model_layout_destroy(&sim_layout);
    if (real_model_layout_init(&sim_layout, &m, PAGE_ELEMENTS) < 0) {
        (void)fprintf(stderr, "sim: %s\n", error_text());
        abort();
    }
}

void sim_stand_launcher(struct launcher *l)
{
    static char run_store[] = "/run/store", other_store[] = "/other/store";
    static char *directories[] = {run_store, other_store};
    memset(l, 0, sizeof *l);
    l->layout = sim_layout;
    l->run.lock_fd = -1;
    l->signal_fd = sim_fd_new(FD_SIGNAL, 0);
    struct config *c = &l->config;
    c->run_watchdog = !config.no_watchdog;
    c->memory_offload_dir.items = directories;
    c->memory_offload_dir.count = config.directories;
    c->training_steps = config.steps;
    if (config.in_epochs) /* half a step less: what is begun is a step */
        c->training_epochs =
            ((double)config.steps - 0.5) * (double)config.microbatches / TRAINING_SAMPLES;
    c->training_micro_batch_size = 1;
    c->training_gradient_accumulation_steps = config.microbatches;
    c->training_skip_nonfinite = true;
    c->training_max_grad_norm = 1.0;
    c->optimizer_learning_rate = 0.01;
    c->optimizer_betas[0] = 0.9;
    c->optimizer_betas[1] = 0.95;
    c->optimizer_eps = 1e-8;
    c->optimizer_weight_decay = 0.1;
    c->lr_scheduler_warmup_steps = 2;
    c->checkpoint_export_interval = config.export_interval;
    c->eval_interval = config.eval_interval;
    c->memory_durability = config.durability;
    c->training_spike = config.spike;
    c->training_spike_factor = 1.5;
    c->data_val_fraction = config.eval_interval && !config.in_epochs ? 0.5 : 0.0;
    c->data_validation.count = config.eval_interval && config.in_epochs;
    c->eval_sample_prompts.count = config.eval_interval ? config.prompts : 0;
}

/* -- the plan -- */

static uint64_t power_of_two(uint64_t n)
{
    uint64_t p = 2;
    while (p < n)
        p *= 2;
    return p;
}

static void set_pool(struct plan *plan, enum region_id pool, uint64_t bytes, uint64_t frames)
{
    plan->pools[pool] = (struct plan_pool){bytes, plan_frame_stride(bytes), frames};
}

static void place_memory(struct plan *plan)
{
    uint64_t pages = sim_layout.n_pages, own = pages / plan->opt_workers + 1;
    struct page_image_layout image;
    page_image_layout(&image, plan->bf16 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, PAGE_ELEMENTS);
    uint64_t frames = plan->prefetch ? plan->prefetch + 1 : 3;
    frames = frames < 2 ? 2 : frames > own ? own : frames;
    frames = frames < 2 ? 2 : frames;
    set_pool(plan, REGION_MICROBATCH_POOL, microbatch_bytes(1, SEQ_LEN), config.microbatch_frames);
    set_pool(plan, REGION_WEIGHTS_POOL, PAGE_ELEMENTS * (plan->bf16 ? 2 : 4), pages);
    set_pool(plan, REGION_GRADIENT_POOL, PAGE_ELEMENTS * sizeof(float), pages);
    set_pool(plan, REGION_STATE_POOL, image.bytes, frames);
    set_pool(plan, REGION_OUT_POOL, image.bytes, frames);
    for (int r = 0; r < RING_COUNT; r++) {
        uint64_t n = plan->pools[topology_rings[r].pool].frames;
        plan->ring_depth[r] =
            power_of_two(topology_rings[r].pool == REGION_WEIGHTS_POOL ? 2 * pages : n);
    }
    plan_place_regions(plan, &sim_layout);
}

int plan_build(struct plan **out, const struct launcher *l, const struct plan_request *request)
{
    enum { CAPACITY = sizeof(struct plan) + 1024 };
    static const char *const directories[] = {"/run/store", "/other/store"};
    if (sim_refuses(REFUSE_PLAN))
        return error_set(ERROR_FAILED, "out of memory");
    struct plan *plan = calloc(1, CAPACITY);
    plan->magic = PLAN_MAGIC;
    plan->layout_version = PLAN_LAYOUT_VERSION;
    plan->mode = request->mode;
    plan->generation = request->generation;
    plan->bytes = sizeof *plan;
    plan->opt_workers = config.opt_workers;
    memcpy(plan->run_uuid, l->run.id, sizeof plan->run_uuid);
    (void)snprintf(plan->token, sizeof plan->token, "%016llx", (unsigned long long)sim_random());
    plan->model = sim_layout.config;
    plan->weights = PLAN_WEIGHTS_RANDOM;
    plan->bf16 = config.bf16;
    plan->page_elements = PAGE_ELEMENTS;
    plan->seed = config.seed;
    plan->seq_len = SEQ_LEN;
    plan->micro_batch_size = 1;
    plan->microbatches = config.microbatches;
    plan->checkpoint_every = config.checkpoint_every;
    plan->threads = 1;
    plan->device_bytes_max = 1 << 30;
    plan->slots_per_page = config.slots;
    plan->io_engine = PLAN_ENGINE_URING;
    plan->prefetch = config.prefetch;
    plan->frame_hashes = config.frame_hashes;
    plan->evaluate_sequences = VALIDATION_SAMPLES;
    plan->checkpoint.export_dtype = -1;
    plan->checkpoint.keep = 2;
    if (plan_text_add(plan, CAPACITY, "/run", &plan->output_dir) < 0 ||
        plan_text_add(plan, CAPACITY, "/run/export", &plan->checkpoint.export_dir) < 0 ||
        plan_texts_add(plan, CAPACITY, directories, config.directories, &plan->offload_dirs) < 0)
        return -(int)error_kind_now();
    place_memory(plan);
    *out = plan;
    return 0;
}

/* -- data, import, export -- */

struct data {
    int nothing;
};
static struct data the_data;

int data_open(struct data **d, const struct data_config *c, data_progress_fn *progress, void *arg)
{
    (void)c;
    *d = &the_data;
    return progress && progress(arg, "", 1, 1) ? -ERROR_STOPPED : 0;
}

void data_close(struct data *d)
{
    (void)d;
}

uint64_t data_samples(const struct data *d, enum data_set set)
{
    (void)d;
    return set == DATA_TRAIN ? TRAINING_SAMPLES : config.eval_interval ? VALIDATION_SAMPLES : 0;
}

int data_read_sample(struct data *d, enum data_set set, uint64_t q, struct data_sample *sample)
{
    (void)d;
    sim_yield();
    for (uint64_t t = 0; t < SEQ_LEN; t++) {
        sample->tokens[t] = (int32_t)(2 * q + t + (set == DATA_TRAIN ? 0 : 100000));
        sample->labels[t] = t ? -1 : (int32_t)(q % VOCABULARY);
        sample->position[t] = (int32_t)t;
        sample->document_start[t] = 0;
    }
    return 0;
}

size_t data_describe(const struct data *d, char *text, size_t capacity)
{
    (void)d;
    (void)capacity;
    *text = '\0';
    return 0;
}

void data_fingerprint(const struct data *d, uint64_t hash[2])
{
    (void)d;
    hash[0] = config.seed;
    hash[1] = 1;
}

int import_open(struct import **im, const struct import_config *c)
{
    (void)c;
    *im = NULL;
    return 0;
}

void import_close(struct import *im)
{
    (void)im;
}

int import_page(struct import *im, const struct model_page *page, void *weights, uint16_t *residual)
{
    (void)im;
    uint64_t number = (uint64_t)(page->layer * 64 + page->index);
    for (uint64_t i = 0; i < page->elements; i++) {
        uint64_t r = sim_hash(config.seed * 4096 + number, i);
        float value = (float)((int)(r & 0xffff) - 0x8000) / 65536.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (residual) {
            ((uint16_t *)weights)[i] = (uint16_t)((bits + 0x8000) >> 16);
            residual[i] = (uint16_t)bits;
        } else {
            memcpy((float *)weights + i, &value, sizeof value);
        }
    }
    return 0;
}

struct export
{
    uint64_t hash, step;
    char out[SIM_PATH_BYTES];
};

int export_open(struct export **e, const struct export_config *c)
{
    static struct export all[8];
    *e = &all[sim.current % 8];
    (*e)->hash = 1;
    (*e)->step = c->step;
    (void)snprintf((*e)->out, sizeof(*e)->out, "%s", c->out);
    return 0;
}

int export_page(struct export *e, const struct model_page *page, const void *weights,
                const uint16_t *residual)
{
    if (sim_export_fails(e->step))
        return error_set(ERROR_FAILED, "no space left for an export");
    e->hash = sim_hash(e->hash, XXH3_64bits(weights, page->elements * (residual ? 2 : 4)));
    if (residual)
        e->hash = sim_hash(e->hash, XXH3_64bits(residual, page->elements * 2));
    sim_yield();
    return 0;
}

int export_finish(struct export *e)
{
    sim_on_export(e->step, e->hash);
    sim_disk_write_file(e->out, &e->hash, sizeof e->hash);
    sim_yield();
    return 0;
}

void export_close(struct export *e)
{
    (void)e;
}

int export_rotate(const char *directory, uint64_t keep)
{
    (void)directory;
    (void)keep;
    return 0;
}

int scrub_run(struct io *io)
{
    (void)io;
    return 0;
}
int offline_digest(struct io *io)
{
    (void)io;
    return 0;
}
int offline_export(struct io *io)
{
    (void)io;
    return 0;
}

/* -- the device -- */

struct device_copy {
    void *to;
    const void *from;
    uint64_t bytes;
    int expands; /* bfloat16: two bytes of the host become four of the device */
};

struct sim_device {
    struct device device;
    struct device_copy copies[COPIES_MAX];
    unsigned n_copies;
};

static void move_copies(struct device *d)
{
    struct sim_device *s = (struct sim_device *)(void *)d;
    for (unsigned i = 0; i < s->n_copies; i++) {
        const struct device_copy *c = &s->copies[i];
        const uint16_t *halves = c->from;
        if (!c->expands)
            memcpy(c->to, c->from, c->bytes);
        for (uint64_t e = 0; c->expands && e < c->bytes / 2; e++)
            ((uint32_t *)c->to)[e] = (uint32_t)halves[e] << 16;
    }
    s->n_copies = 0;
}

static void enqueue(struct device *d, void *to, const void *from, uint64_t bytes)
{
    struct sim_device *s = (struct sim_device *)(void *)d;
    if (s->n_copies == COPIES_MAX)
        move_copies(d);
    s->copies[s->n_copies++] = (struct device_copy){to, from, bytes, 0};
}

static void device_synchronize(struct device *d)
{
    sim_yield();
    move_copies(d);
}

static void *device_alloc(struct device *d, uint64_t bytes)
{
    (void)d;
    return calloc(1, bytes);
}

static void device_free(struct device *d, void *memory)
{
    (void)d;
    free(memory);
}

static void device_load(struct device *d, compute_t *to, const void *from,
                        enum device_host_dtype dtype, uint64_t elements)
{
    struct sim_device *s = (struct sim_device *)(void *)d;
    int half = dtype == DEVICE_HOST_BF16;
    enqueue(d, to, from, elements * (half ? 2 : 4));
    s->copies[s->n_copies - 1].expands = half;
}

static void device_zero(struct device *d, void *memory, uint64_t bytes)
{
    move_copies(d);
    memset(memory, 0, bytes);
}

static void device_add(struct device *d, float *to, const float *from, uint64_t elements)
{
    move_copies(d);
    for (uint64_t i = 0; i < elements; i++)
        to[i] += from[i];
}

static void device_end(struct device *d)
{
    free(d);
}

static const char *device_lineage(const struct device *d)
{
    (void)d;
    return "sim";
}

static const struct device_ops ops = {.alloc = device_alloc,
                                      .free = device_free,
                                      .copy_in = enqueue,
                                      .copy_out = enqueue,
                                      .copy = enqueue,
                                      .zero = device_zero,
                                      .synchronize = device_synchronize,
                                      .load = device_load,
                                      .add = device_add,
                                      .close = device_end,
                                      .lineage = device_lineage};

int device_cpu_open(struct device **out, enum device_dtype dtype, uint32_t threads)
{
    (void)threads;
    struct sim_device *s = calloc(1, sizeof *s);
    s->device = (struct device){.ops = &ops, .dtype = dtype, .compute_bytes = 4};
    *out = &s->device;
    return 0;
}

void device_cpu_set_heartbeat(struct device *d, _Atomic uint64_t *heartbeat)
{
    (void)d;
    (void)heartbeat;
}

/* -- layers: an activation is one hash -- */

struct layers {
    struct device *device;
};

uint64_t layers_bytes(const struct device *d, const struct model_layout *layout,
                      const struct layers_shape *shape)
{
    (void)d;
    (void)layout;
    (void)shape;
    return 0;
}

int layers_init(struct layers **out, struct device *d, const struct model_layout *layout,
                const struct layers_shape *shape)
{
    (void)layout;
    (void)shape;
    *out = calloc(1, sizeof **out);
    (*out)->device = d;
    return 0;
}

void layers_destroy(struct layers *l)
{
    free(l);
}

static uint64_t get(const compute_t *x)
{
    uint64_t h;
    memcpy(&h, x, sizeof h);
    return h;
}

static void set(compute_t *x, uint64_t h)
{
    memcpy(x, &h, sizeof h);
}

static uint64_t weights_hash(const compute_t *weights, uint32_t layer)
{
    return sim_hash(layer, XXH3_64bits(weights, model_group_elements(&sim_layout, layer) * 4));
}

static uint64_t batch_hash(const struct layers_batch *batch)
{
    return sim_hash((uint64_t)batch->tokens[0], (uint64_t)batch->tokens[1] << 8);
}

static void accumulate(float *gradients, uint64_t elements, uint64_t h)
{
    for (uint64_t i = 0; i < elements; i++)
        gradients[i] += (float)((int)(sim_hash(h, i) & 0xff) - 128) / 1024.0f;
}

static uint64_t step_of(const struct layers_batch *batch)
{
    return (uint64_t)batch->tokens[0] / 2 / config.microbatches + 1;
}

static int skipped(const struct layers_batch *batch)
{
    uint64_t step = step_of(batch);
    return step <= config.steps && (config.skip_mask >> step & 1);
}

void layers_embedding_forward(struct layers *l, const compute_t *weights,
                              const struct layers_batch *batch, compute_t *x)
{
    move_copies(l->device);
    set(x, sim_hash(weights_hash(weights, 0), batch_hash(batch)));
}

void layers_block_forward(struct layers *l, uint64_t layer, const compute_t *weights,
                          const struct layers_batch *batch, const compute_t *x_in, compute_t *x_out,
                          int64_t slot)
{
    (void)batch;
    (void)slot;
    move_copies(l->device);
    set(x_out, sim_hash(get(x_in), weights_hash(weights, (uint32_t)layer)));
}

static uint64_t head_hash(const struct layers_head *head, const compute_t *x)
{
    uint64_t h = sim_hash(get(x), XXH3_64bits(head->norm, HIDDEN * sizeof(float)));
    return sim_hash(h, XXH3_64bits(head->matrix, VOCABULARY * HIDDEN * sizeof(float)));
}

static double loss_of(uint64_t h)
{
    return (double)(h >> 40) / (1 << 24);
}

void layers_head(struct layers *l, const struct layers_head *head, const struct layers_batch *batch,
                 const compute_t *x, double loss_scale, compute_t *dx, double *loss_sum)
{
    (void)loss_scale;
    move_copies(l->device);
    uint64_t h = sim_hash(head_hash(head, x), batch_hash(batch));
    *loss_sum = loss_of(h);
    accumulate(head->norm_gradient, HIDDEN, h);
    accumulate(head->matrix_gradient, (uint64_t)VOCABULARY * HIDDEN, h + 1);
    set(dx, sim_hash(h, 5));
}

void layers_head_loss(struct layers *l, const struct layers_head *head,
                      const struct layers_batch *batch, const compute_t *x, double *loss_sum)
{
    move_copies(l->device);
    *loss_sum = loss_of(sim_hash(head_hash(head, x), batch_hash(batch)));
}

/* Of a microbatch an expert gets no token one time in three: its gradient is left as it is, and
 * where all of a step pass it by, zero. */
static void accumulate_experts(float *gradients, uint32_t layer, const struct layers_batch *batch,
                               uint64_t h)
{
    for (uint32_t e = 1; e <= sim_layout.layers[layer].n_experts; e++) {
        const struct model_layer *expert = &sim_layout.layers[layer + e];
        if (sim_hash(batch_hash(batch), 900 + e) % 3)
            accumulate(gradients + expert->start, expert->elements, sim_hash(h, e));
    }
}

void layers_block_backward(struct layers *l, uint64_t layer, const compute_t *weights,
                           float *gradients, const struct layers_batch *batch,
                           const compute_t *x_in, compute_t *dx, int64_t slot)
{
    (void)batch;
    (void)slot;
    move_copies(l->device);
    uint64_t h = sim_hash(sim_hash(get(dx), get(x_in)), weights_hash(weights, (uint32_t)layer));
    accumulate(gradients, sim_layout.layers[layer].elements, h);
    accumulate_experts(gradients, (uint32_t)layer, batch, h);
    set(dx, h);
}

double layers_balance_loss(struct layers *l, const double *balance, double coefficient,
                           float *slope)
{
    (void)l;
    (void)balance;
    (void)coefficient;
    (void)slope;
    return 0.0; /* no model here has such a loss */
}

void layers_embedding_backward(struct layers *l, float *gradients, const struct layers_batch *batch,
                               const compute_t *dx)
{
    move_copies(l->device);
    accumulate(gradients, (uint64_t)VOCABULARY * HIDDEN, sim_hash(get(dx), batch_hash(batch)));
    if (skipped(batch))
        gradients[3] = INFINITY;
    uint64_t wrong = sim_flip(step_of(batch));
    if (wrong)
        gradients[wrong % 4] += (float)(1000 * wrong);
}

/* -- generation: not simulated -- */

int samples_begin(struct launcher *l, uint64_t step)
{
    (void)l;
    (void)step;
    return 0;
}

int samples_turn(struct launcher *l)
{
    (void)l;
    return 0;
}

void samples_drop(struct launcher *l)
{
    (void)l;
}

int generate_open(struct gpu *g)
{
    (void)g;
    return 0;
}
void generate_close(struct gpu *g)
{
    (void)g;
}
uint64_t generate_context(const struct plan *plan)
{
    (void)plan;
    return 0;
}
uint64_t generate_bytes(const struct plan *plan, const struct model_layout *layout, uint64_t bytes)
{
    (void)plan;
    (void)layout;
    (void)bytes;
    return 0;
}
int gpu_generate(struct gpu *g)
{
    sim_yield();
    atomic_fetch_add_explicit(&g->w->self->generated, 1, memory_order_release);
    worker_fact(g->w);
    return 0;
}

/* -- what is told -- */

int error_set(enum error_kind kind, const char *format, ...)
{
    struct sim_process *p = sim_self();
    if (!p)
        return -(int)kind;
    va_list args;
    va_start(args, format);
    if (sim.trace)
        (void)vsnprintf(p->error, sizeof p->error, format, args);
    else /* nobody reads it: the sentence without its values will do */
        (void)strncpy(p->error, format, 63);
    va_end(args);
    p->error_kind = kind;
    return -(int)kind;
}

int error_wrap(const char *format, ...)
{
    struct sim_process *p = sim_self();
    char joined[512];
    va_list args;
    if (!p)
        return -ERROR_FAILED;
    if (sim.trace) {
        va_start(args, format);
        int n = vsnprintf(joined, sizeof joined, format, args);
        va_end(args);
        if (n > 0 && (size_t)n < sizeof joined)
            (void)snprintf(joined + n, sizeof joined - (size_t)n, ": %.200s", p->error);
        memcpy(p->error, joined, sizeof joined);
    }
    return -(int)p->error_kind;
}

int error_hint(const char *format, ...)
{
    (void)format;
    return sim_self() ? -(int)sim_self()->error_kind : -ERROR_FAILED;
}

int error_as(enum error_kind kind)
{
    if (sim_self())
        sim_self()->error_kind = kind;
    return -(int)kind;
}

const char *error_text(void)
{
    return sim_self() ? sim_self()->error : "";
}

enum error_kind error_kind_now(void)
{
    return sim_self() ? sim_self()->error_kind : ERROR_NONE;
}

void error_clear(void)
{
    if (sim_self())
        sim_self()->error_kind = ERROR_NONE;
}

static void tell(const char *format, va_list args)
{
    char text[512];
    if (!sim.trace)
        return;
    (void)vsnprintf(text, sizeof text, format, args);
    sim_trace("%s", text);
}

int sim_fprintf(FILE *stream, const char *format, ...);
int sim_fprintf(FILE *stream, const char *format, ...)
{
    va_list args;
    (void)stream;
    va_start(args, format);
    tell(format, args);
    va_end(args);
    return 0;
}

int sim_fputc(int c, FILE *stream);
int sim_fputc(int c, FILE *stream)
{
    return stream == stderr ? c : fputc(c, stream);
}

int sim_fputs(const char *text, FILE *stream);
int sim_fputs(const char *text, FILE *stream)
{
    return stream == stderr ? 0 : fputs(text, stream);
}

size_t sim_fwrite(const void *data, size_t bytes, size_t n, FILE *stream);
size_t sim_fwrite(const void *data, size_t bytes, size_t n, FILE *stream)
{
    return stream == stderr ? n : fwrite(data, bytes, n, stream);
}

void printable_put(const char *text, FILE *stream)
{
    (void)stream;
    sim_trace("%s", text);
}

char *sim_getenv(const char *name);
char *sim_getenv(const char *name)
{
    (void)name;
    return NULL;
}

/* Names and numbers are formatted at every message: the simple formats, quickly. */
static char *put_text(char *at, const char *end, const char *text, size_t n)
{
    for (size_t i = 0; i < n && text[i]; i++)
        if (at < end)
            *at++ = text[i];
    return at;
}

static char *put_number(char *at, const char *end, unsigned long long value)
{
    char digits[24];
    int n = 0;
    do
        digits[n++] = (char)('0' + value % 10);
    while (value /= 10);
    while (n > 0)
        at = put_text(at, end, &digits[--n], 1);
    return at;
}

static int is_simple(const char *format)
{
    for (const char *p = strchr(format, '%'); p; p = strchr(p + 1, '%'))
        if (p[1] != 's' && p[1] != 'u' && strncmp(p, "%llu", 4) != 0)
            return 0;
    return 1;
}

int sim_snprintf(char *out, size_t bytes, const char *format, ...);
int sim_snprintf(char *out, size_t bytes, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (bytes == 0 || !is_simple(format)) {
        int n = vsnprintf(out, bytes, format, args);
        va_end(args);
        return n;
    }
    char *at = out;
    const char *end = out + bytes - 1;
    for (const char *p = format; *p; p++) {
        if (*p != '%') {
            at = put_text(at, end, p, 1);
        } else if (*++p == 's') {
            at = put_text(at, end, va_arg(args, const char *), SIZE_MAX);
        } else if (*p == 'u') {
            at = put_number(at, end, va_arg(args, unsigned));
        } else {
            at = put_number(at, end, va_arg(args, unsigned long long));
            p += 2;
        }
    }
    va_end(args);
    *at = '\0';
    return (int)(at - out);
}

void log_line(enum log_level level, const char *format, ...)
{
    va_list args;
    (void)level;
    va_start(args, format);
    tell(format, args);
    va_end(args);
}

int log_open(const char *dir, const char *name, uint64_t max_bytes)
{
    (void)dir;
    (void)name;
    (void)max_bytes;
    return 0;
}
void log_set_threshold(enum log_level level)
{
    (void)level;
}
void log_close(void) {}

void progress_say(struct progress *progress, const char *format, ...)
{
    va_list args;
    (void)progress;
    va_start(args, format);
    tell(format, args);
    va_end(args);
}

void progress_warn(struct progress *progress, const char *format, ...)
{
    va_list args;
    (void)progress;
    va_start(args, format);
    tell(format, args);
    va_end(args);
}

void progress_startup(struct progress *progress, const struct worker_control *control)
{
    (void)progress;
    (void)control;
}

/* The hash as the step's line has it: all that the oracle looks for. */
void step_line_hash(char text[33], const uint8_t hash[16])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        text[2 * i] = digits[hash[15 - i] >> 4];
        text[2 * i + 1] = digits[hash[15 - i] & 15];
    }
    text[32] = '\0';
}

int step_line_write(struct launcher *l, uint64_t step)
{
    char line[128], hash[33];
    step_line_hash(hash, l->session.io->state_hash[step % PLAN_SLACK_STEPS]);
    (void)snprintf(line, sizeof line, "{\"step\": %llu, \"state_hash\": \"%s\"}",
                   (unsigned long long)step, hash);
    return metrics_append(l->metrics, line);
}

void step_line_show(struct launcher *l, uint64_t step)
{
    sim_trace("told: step %llu", (unsigned long long)step);
    if (step <= l->coordinator.committed)
        sim_on_announced(step);
}
