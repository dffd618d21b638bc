/*
 * Generation: all prompts per sweep over the weights, with a key/value cache.
 *
 * A sweep feeds, for each unfinished prompt, the tokens that its cache lacks (the whole prompt at
 * first, as many rows as fit; one token later), and every prompt that is fully fed gets its next
 * token. Greedy at temperature 0; else softmax(logits / temperature) cut to the smallest set of
 * most likely tokens with probability top_p (nucleus sampling, Holtzman et al. 2020), drawn by a
 * counter-based random number of (seed, prompt, position).
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_worker/gpu.h"
#include "model/random.h"
#include "model/tokenizer_bytes.h"
#include "procs/error.h"
#include "procs/fault.h"

struct candidate {
    float logit;
    int32_t token;
};

struct generation {
    uint64_t prompts, context, rows_max;
    int32_t *tokens;         /* [prompts][context] */
    uint64_t *lengths, *fed; /* tokens known, tokens in the cache */
    uint64_t *first;         /* tokens of the prompt itself */
    unsigned char *done;
    int32_t *rows;                /* device: [3][rows_max]: token, sequence, position */
    int32_t *rows_host;           /* the same, being built */
    uint64_t *last_row;           /* per prompt: its last row in this sweep, UINT64_MAX without */
    compute_t **cache;            /* [blocks][2] */
    compute_t *gathered;          /* (prompts, C) */
    float *logits;                /* device: (prompts, V) */
    float *logits_host;           /* (V) */
    struct candidate *candidates; /* (V) */
};

uint64_t generate_context(const struct plan *plan)
{
    uint64_t longest = 0;
    const int32_t *first = plan_ids_get(plan, plan->generate.prompt_first);
    for (uint64_t i = 0; i < plan->generate.prompts.count; i++) {
        uint64_t n = (uint64_t)(first[i + 1] - first[i]);
        if (n > longest)
            longest = n;
    }
    return plan->generate.prompts.count ? longest + 1 + plan->generate.max_new_tokens : 0;
}

static uint64_t cache_bytes(const struct plan *plan, const struct model_layout *layout,
                            uint64_t compute_bytes)
{
    return plan->generate.prompts.count * generate_context(plan) * layout->config.n_kv_heads *
           layout->config.head_dim * compute_bytes;
}

uint64_t generate_bytes(const struct plan *plan, const struct model_layout *layout,
                        uint64_t compute_bytes)
{
    uint64_t n = plan->generate.prompts.count;
    if (n == 0)
        return 0;
    return 2 * layout->config.n_layers * cache_bytes(plan, layout, compute_bytes) +
           n * layout->config.hidden_size * compute_bytes +
           n * layout->config.vocab_size * sizeof(float) +
           3 * plan->micro_batch_size * plan->seq_len * sizeof(int32_t);
}

static void start_prompts(struct gpu *g)
{
    struct generation *n = g->generation;
    const struct plan *plan = g->w->plan;
    const int32_t *ids = plan_ids_get(plan, plan->generate.prompt_ids);
    const int32_t *first = plan_ids_get(plan, plan->generate.prompt_first);
    for (uint64_t p = 0; p < n->prompts; p++) {
        n->lengths[p] = (uint64_t)(first[p + 1] - first[p]);
        memcpy(n->tokens + p * n->context, ids + first[p], n->lengths[p] * sizeof *ids);
        n->first[p] = n->lengths[p];
        n->fed[p] = 0;
        n->done[p] = g->w->plan->generate.max_new_tokens == 0;
    }
}

static int allocate_host(struct generation *n, uint64_t blocks, uint64_t vocabulary)
{
    n->tokens = calloc(n->prompts * n->context, sizeof *n->tokens);
    n->lengths = calloc(n->prompts, sizeof *n->lengths);
    n->fed = calloc(n->prompts, sizeof *n->fed);
    n->first = calloc(n->prompts, sizeof *n->first);
    n->done = calloc(n->prompts, 1);
    n->last_row = calloc(n->prompts, sizeof *n->last_row);
    n->rows_host = calloc(3 * n->rows_max, sizeof *n->rows_host);
    n->cache = calloc(2 * blocks, sizeof(compute_t *));
    n->logits_host = calloc(vocabulary, sizeof *n->logits_host);
    n->candidates = calloc(vocabulary, sizeof *n->candidates);
    return n->tokens && n->lengths && n->fed && n->first && n->done && n->last_row &&
                   n->rows_host && n->cache && n->logits_host && n->candidates
               ? 0
               : error_set(ERROR_FAILED, "out of memory for generation");
}

static int allocate_device(struct gpu *g)
{
    struct generation *n = g->generation;
    struct device *d = g->device;
    const struct model_config *c = &g->w->layout.config;
    uint64_t bytes = cache_bytes(g->w->plan, &g->w->layout, d->compute_bytes);
    for (uint64_t i = 0; i < 2 * c->n_layers; i++)
        if (!(n->cache[i] = d->ops->alloc(d, bytes)))
            return error_wrap("key/value cache");
    n->rows = d->ops->alloc(d, 3 * n->rows_max * sizeof *n->rows);
    n->gathered = d->ops->alloc(d, n->prompts * c->hidden_size * d->compute_bytes);
    n->logits = d->ops->alloc(d, n->prompts * c->vocab_size * sizeof(float));
    return n->rows && n->gathered && n->logits ? 0 : error_wrap("generation buffers");
}

int generate_open(struct gpu *g)
{
    const struct plan *plan = g->w->plan;
    if (plan->generate.prompts.count == 0)
        return 0;
    g->generation = calloc(1, sizeof *g->generation);
    if (!g->generation)
        return error_set(ERROR_FAILED, "out of memory for generation");
    g->generation->prompts = plan->generate.prompts.count;
    g->generation->context = generate_context(plan);
    g->generation->rows_max = plan->micro_batch_size * plan->seq_len;
    if (g->generation->prompts > g->generation->rows_max)
        return error_set(ERROR_USER,
                         "%llu prompts: at most %llu (micro_batch_size x seq_len) at a time",
                         (unsigned long long)g->generation->prompts,
                         (unsigned long long)g->generation->rows_max);
    if (allocate_host(g->generation, g->w->layout.config.n_layers, g->w->layout.config.vocab_size) <
        0)
        return -(int)error_kind_now();
    return allocate_device(g);
}

void generate_close(struct gpu *g)
{
    struct generation *n = g->generation;
    if (!n)
        return;
    for (uint64_t i = 0; n->cache && i < 2 * g->w->layout.config.n_layers; i++)
        g->device->ops->free(g->device, n->cache[i]);
    g->device->ops->free(g->device, n->rows);
    g->device->ops->free(g->device, n->gathered);
    g->device->ops->free(g->device, n->logits);
    free(n->tokens);
    free(n->lengths);
    free(n->fed);
    free(n->first);
    free(n->done);
    free(n->last_row);
    free(n->rows_host);
    free(n->cache);
    free(n->logits_host);
    free(n->candidates);
    free(n);
    g->generation = NULL;
}

/* Rows that the caches lack, prompt after prompt, as many as fit. */
static uint64_t gather_rows(struct generation *n)
{
    uint64_t rows = 0;
    for (uint64_t p = 0; p < n->prompts; p++) {
        n->last_row[p] = UINT64_MAX;
        if (n->done[p])
            continue;
        for (; n->fed[p] < n->lengths[p] && rows < n->rows_max; n->fed[p]++, rows++) {
            n->rows_host[rows] = n->tokens[p * n->context + n->fed[p]];
            n->rows_host[n->rows_max + rows] = (int32_t)p;
            n->rows_host[2 * n->rows_max + rows] = (int32_t)n->fed[p];
            if (n->fed[p] + 1 == n->lengths[p])
                n->last_row[p] = rows;
        }
    }
    return rows;
}

/* Logits of each prompt that is fully fed, in prompt order; their number. */
static uint64_t head_rows(struct gpu *g, const compute_t *x)
{
    struct generation *n = g->generation;
    uint64_t width = g->w->layout.config.hidden_size, rows = 0;
    struct layers_head head;
    for (uint64_t p = 0; p < n->prompts; p++)
        if (n->last_row[p] != UINT64_MAX)
            g->device->ops->copy(g->device, device_at(g->device, n->gathered, rows++ * width),
                                 device_at(g->device, x, n->last_row[p] * width),
                                 width * g->device->compute_bytes);
    gpu_head(g, &head);
    layers_head_logits(g->layers, &head, n->gathered, rows, n->logits);
    return rows;
}

static int sweep(struct gpu *g, uint64_t rows)
{
    struct generation *n = g->generation;
    uint64_t number = gpu_request_sweep(g);
    compute_t *x = buffers_dx(&g->buffers, 0);
    struct layers_decode decode = {.rows = rows,
                                   .tokens = n->rows,
                                   .sequence = n->rows + n->rows_max,
                                   .position = n->rows + 2 * n->rows_max,
                                   .context = n->context};
    g->device->ops->copy_in(g->device, n->rows, n->rows_host, 3 * n->rows_max * sizeof *n->rows);
    for (uint64_t v = 0; v < g->forward_visits.n_visits; v++) {
        const struct visit *visit = &g->forward_visits.visits[v];
        int rc = gpu_take_weights(g, SWEEP_FORWARD, number, v);
        if (rc < 0)
            return rc;
        if (visit->kind == VISIT_HEAD)
            (void)head_rows(g, x); /* counted again by whoever reads the logits */
        else if (visit->layer == 0)
            layers_embedding_decode(g->layers, g->buffers.weights[0], &decode, x);
        else
            layers_block_decode(g->layers, visit->layer, g->buffers.weights[0], &decode, x,
                                n->cache[2 * (visit->block - 1)],
                                n->cache[2 * (visit->block - 1) + 1]);
        fault_point(FAULT_gpu_mid_generation);
    }
    return 0;
}

static int32_t most_likely(const float *logits, uint64_t vocabulary)
{
    uint64_t best = 0;
    for (uint64_t i = 1; i < vocabulary; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

/* Most likely first; equal logits by token, so that the order is total. */
static int by_likelihood(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

static int32_t draw(struct gpu *g, uint64_t prompt)
{
    struct generation *n = g->generation;
    const struct plan_generate *options = &g->w->plan->generate;
    uint64_t vocabulary = g->w->layout.config.vocab_size, kept = 0;
    for (uint64_t i = 0; i < vocabulary; i++)
        n->candidates[i] = (struct candidate){n->logits_host[i], (int32_t)i};
    qsort(n->candidates, vocabulary, sizeof *n->candidates, by_likelihood);
    double total = 0.0, mass = 0.0, top = n->candidates[0].logit;
    for (uint64_t i = 0; i < vocabulary; i++)
        total += exp(((double)n->candidates[i].logit - top) / options->temperature);
    while (kept < vocabulary && (kept == 0 || mass < options->top_p * total))
        mass += exp(((double)n->candidates[kept++].logit - top) / options->temperature);
    struct random_key key = {.seed = options->seed, .purpose = RANDOM_SAMPLING, .step = prompt};
    double at = random_uniform(key, n->lengths[prompt]) * mass;
    for (uint64_t i = 0; i < kept; i++) {
        at -= exp(((double)n->candidates[i].logit - top) / options->temperature);
        if (at <= 0.0)
            return n->candidates[i].token;
    }
    return n->candidates[kept - 1].token;
}

static int is_end(const struct gpu *g, int32_t token)
{
    const struct model_config *c = &g->w->layout.config;
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (token == c->eos_token_id[i])
            return 1;
    return g->w->plan->data.tokenizer_is_bytes && token == TOKENIZER_BYTES_END;
}

/* The next token of every prompt that has logits; 1 while any prompt goes on. */
static int choose(struct gpu *g)
{
    struct generation *n = g->generation;
    uint64_t vocabulary = g->w->layout.config.vocab_size, row = 0;
    int going = 0;
    for (uint64_t p = 0; p < n->prompts; p++) {
        if (n->last_row[p] != UINT64_MAX) {
            g->device->ops->copy_out(g->device, n->logits_host, n->logits + row++ * vocabulary,
                                     vocabulary * sizeof(float));
            int32_t token = g->w->plan->generate.temperature > 0.0
                                ? draw(g, p)
                                : most_likely(n->logits_host, vocabulary);
            n->tokens[p * n->context + n->lengths[p]++] = token;
            n->done[p] = is_end(g, token) ||
                         n->lengths[p] - n->first[p] == g->w->plan->generate.max_new_tokens;
        }
        going |= !n->done[p];
    }
    return going;
}

static void publish(struct gpu *g)
{
    struct generation *n = g->generation;
    struct generated *out = segment_region(&g->w->segment, REGION_GENERATED, 0);
    out->prompts = n->prompts;
    out->tokens_max = g->w->plan->generate.max_new_tokens;
    for (uint64_t p = 0; p < n->prompts; p++) {
        generated_counts(out)[p] = n->lengths[p] - n->first[p];
        memcpy(generated_tokens(out, p), n->tokens + p * n->context + n->first[p],
               (n->lengths[p] - n->first[p]) * sizeof(int32_t));
    }
}

int gpu_generate(struct gpu *g)
{
    struct worker_control *self = g->w->self;
    int going = 1;
    start_prompts(g);
    for (uint64_t p = 0; p < g->generation->prompts; p++)
        going &= !g->generation->done[p];
    while (going) {
        int rc = sweep(g, gather_rows(g->generation));
        if (rc < 0 || (rc = worker_check(g->w)) < 0)
            return rc;
        going = choose(g);
    }
    publish(g);
    fault_point(FAULT_gpu_generated);
    atomic_fetch_add_explicit(&self->generated, 1, memory_order_release);
    worker_fact(g->w);
    return 0;
}
