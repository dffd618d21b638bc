#include "gpu_worker/buffers.h"

#include <string.h>

#include "procs/error.h"

/* How many elements or copies of each kind a plan needs; one place for sizes and allocation. */
struct sizes {
    uint64_t weights[2], gradients, head_share; /* bytes */
    uint64_t starts, inner, last;               /* activations per microbatch */
    uint64_t activation, batch, discard;        /* bytes of one */
    uint64_t balance, balance_slope;            /* bytes, per microbatch */
};

static void count(struct sizes *s, const struct plan *plan, const struct model_layout *layout,
                  uint32_t every, uint64_t compute_bytes)
{
    const struct model_config *m = &layout->config;
    int train = plan->mode == PLAN_TRAIN;
    uint64_t n = every > 1 ? every : 1;
    memset(s, 0, sizeof *s);
    s->weights[0] = layout->group_elements_max * compute_bytes;
    if (m->tie_word_embeddings)
        s->weights[1] = layout->layers[0].elements * compute_bytes;
    if (train) {
        s->gradients = layout->group_elements_max * sizeof(float);
        if (m->tie_word_embeddings)
            s->head_share = m->vocab_size * m->hidden_size * sizeof(float);
    }
    s->activation = plan->micro_batch_size * plan->seq_len * m->hidden_size * compute_bytes;
    s->starts = train ? (m->n_layers + n - 1) / n : 0;
    s->inner = train ? n - 1 : 0;
    s->last = 1;
    s->discard = s->inner ? s->activation : 0;
    if (train && m->router_aux_loss > 0) {
        s->balance = 2 * m->n_experts * sizeof(double);
        s->balance_slope = m->n_experts * sizeof(float);
    }
    s->batch = 4 * plan->micro_batch_size * plan->seq_len * sizeof(int32_t);
}

uint64_t buffers_bytes(const struct plan *plan, const struct model_layout *layout, uint32_t every,
                       uint64_t compute_bytes)
{
    struct sizes s;
    count(&s, plan, layout, every, compute_bytes);
    return s.weights[0] + s.weights[1] + s.gradients + s.head_share + s.discard +
           plan->microbatches * ((s.starts + s.inner + s.last) * s.activation + s.batch +
                                 s.balance + s.balance_slope);
}

static int take(struct device *d, void *out, uint64_t bytes)
{
    void *p = NULL;
    if (bytes && !(p = d->ops->alloc(d, bytes)))
        return error_wrap("device buffers");
    memcpy(out, &p, sizeof p);
    return 0;
}

int buffers_open(struct buffers *b, struct device *device, const struct plan *plan,
                 const struct model_layout *layout, uint32_t every)
{
    struct sizes s;
    count(&s, plan, layout, every, device->compute_bytes);
    memset(b, 0, sizeof *b);
    b->device = device;
    b->microbatches = plan->microbatches;
    b->group = every > 1 ? every : 1;
    b->blocks = layout->config.n_layers;
    b->activation_bytes = s.activation;
    b->experts = s.balance ? layout->config.n_experts : 0;
    b->batch_elements = plan->micro_batch_size * plan->seq_len;
    uint64_t per = plan->microbatches * s.activation;
    if (take(device, &b->weights[0], s.weights[0]) < 0 ||
        take(device, &b->weights[1], s.weights[1]) < 0 ||
        take(device, &b->gradients, s.gradients) < 0 ||
        take(device, &b->head_share, s.head_share) < 0 ||
        take(device, &b->starts, s.starts * per) < 0 ||
        take(device, &b->inner, s.inner * per) < 0 || take(device, &b->last, s.last * per) < 0 ||
        take(device, &b->discard, s.discard) < 0 ||
        take(device, &b->balance, plan->microbatches * s.balance) < 0 ||
        take(device, &b->balance_slope, plan->microbatches * s.balance_slope) < 0 ||
        take(device, &b->batch, plan->microbatches * s.batch) < 0)
        return -(int)error_kind_now();
    return 0;
}

void buffers_close(struct buffers *b)
{
    if (!b->device)
        return;
    void *all[] = {b->weights[0], b->weights[1],    b->gradients, b->head_share,
                   b->starts,     b->inner,         b->last,      b->discard,
                   b->balance,    b->balance_slope, b->batch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        b->device->ops->free(b->device, all[i]);
}

compute_t *buffers_input(const struct buffers *b, uint64_t block, uint64_t microbatch)
{
    char *base = b->last;
    uint64_t index = 0;
    if (block <= b->blocks) {
        uint64_t place = (block - 1) % b->group;
        base = place == 0 ? b->starts : b->inner;
        index = place == 0 ? (block - 1) / b->group : place - 1;
    }
    return (compute_t *)(void *)(base +
                                 (index * b->microbatches + microbatch) * b->activation_bytes);
}

compute_t *buffers_dx(const struct buffers *b, uint64_t microbatch)
{
    return (compute_t *)(void *)(b->last + microbatch * b->activation_bytes);
}

void buffers_batch(const struct buffers *b, uint64_t microbatch, struct layers_batch *batch)
{
    const int32_t *at = b->batch + microbatch * 4 * b->batch_elements;
    *batch = (struct layers_batch){0};
    batch->tokens = at;
    batch->labels = at + b->batch_elements;
    batch->position = at + 2 * b->batch_elements;
    batch->document_start = at + 3 * b->batch_elements;
}

double *buffers_balance(const struct buffers *b, uint64_t microbatch)
{
    return b->balance ? b->balance + microbatch * 2 * b->experts : NULL;
}

float *buffers_balance_slope(const struct buffers *b, uint64_t microbatch)
{
    return b->balance_slope ? b->balance_slope + microbatch * b->experts : NULL;
}
