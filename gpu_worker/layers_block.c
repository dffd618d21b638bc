/*
 * The Llama decoder block:
 *
 *     h = norm(x) w_in;    q, k, v = h Wq^T, h Wk^T, h Wv^T;   q, k = rope(q), rope(k)
 *     m = x + attention(q, k, v) Wo^T
 *     h = norm(m) w_post;  g, u = h Wg^T, h Wu^T;   y = m + (silu(g) u) Wd^T
 */
#include "gpu_worker/layers_internal.h"
#include "procs/check.h"

/* A block at work on one microbatch. */
struct block {
    struct layers *layers;
    struct device *device;
    const struct device_ops *ops;
    const struct model_config *config;
    uint64_t layer, rows;
    const compute_t *weights;
    float *gradients; /* NULL in forward */
    struct layers_slot *slot;
};

static struct block block_of(struct layers *layers, uint64_t layer, const compute_t *weights,
                             int64_t slot)
{
    CHECK(slot == LAYERS_NO_SLOT || (slot >= 0 && (uint64_t)slot < layers->shape.saved_slots));
    uint64_t index = slot == LAYERS_NO_SLOT ? layers->shape.saved_slots : (uint64_t)slot;
    return (struct block){.layers = layers,
                          .device = layers->device,
                          .ops = layers->device->ops,
                          .config = &layers->layout->config,
                          .layer = layer,
                          .rows = layers->rows,
                          .weights = weights,
                          .slot = &layers->slots[index]};
}

static const compute_t *weight(const struct block *b, enum model_role role)
{
    return layers_weight(b->layers, b->weights, b->layer, role);
}

static float *gradient(const struct block *b, enum model_role role)
{
    return layers_gradient(b->layers, b->gradients, b->layer, role);
}

static struct device_linear linear(const struct block *b, uint64_t in, uint64_t out)
{
    return (struct device_linear){.rows = b->rows, .in = in, .out = out};
}

static void rope(const struct block *b, const int32_t *position, enum device_direction direction,
                 compute_t *q, compute_t *k)
{
    struct device_rope args = {.rows = b->rows,
                               .heads = b->config->n_heads,
                               .head_dim = b->config->head_dim,
                               .cosine = b->layers->cosine,
                               .sine = b->layers->sine,
                               .position = position};
    b->ops->rope(b->device, q, args, direction);
    args.heads = b->config->n_kv_heads;
    b->ops->rope(b->device, k, args, direction);
}

/* x (rows,C) -> normed */
static void norm_forward(const struct block *b, enum model_role role, const compute_t *x,
                         float *rstd)
{
    b->ops->norm_forward(b->device,
                         &(struct device_norm_forward){.norm = DEVICE_RMSNORM,
                                                       .epsilon = (float)b->config->rms_norm_eps,
                                                       .rows = b->rows,
                                                       .width = b->config->hidden_size,
                                                       .y = b->layers->normed,
                                                       .rstd = rstd,
                                                       .x = x,
                                                       .w = weight(b, role)});
}

/* x (rows,C) -> slot's q, k, v */
static void project(const struct block *b, const compute_t *x, const int32_t *position)
{
    const struct layers *ls = b->layers;
    struct layers_slot *slot = b->slot;
    uint64_t hidden = b->config->hidden_size;
    struct device_linear query = linear(b, hidden, ls->query_size);
    struct device_linear key = linear(b, hidden, ls->key_size);
    norm_forward(b, MODEL_INPUT_NORM, x, slot->rstd_input);
    b->ops->linear_forward(b->device, slot->q, ls->normed, weight(b, MODEL_Q), NULL, query);
    b->ops->linear_forward(b->device, slot->k, ls->normed, weight(b, MODEL_K), NULL, key);
    b->ops->linear_forward(b->device, slot->v, ls->normed, weight(b, MODEL_V), NULL, key);
    rope(b, position, DEVICE_FORWARD, slot->q, slot->k);
}

/* slot's attended -> middle, gate, up */
static void widen(const struct block *b, const compute_t *x)
{
    const struct layers *ls = b->layers;
    struct layers_slot *slot = b->slot;
    uint64_t hidden = b->config->hidden_size;
    struct device_linear wide = linear(b, hidden, b->config->intermediate_size);
    b->ops->linear_forward(b->device, slot->middle, slot->attended, weight(b, MODEL_O), x,
                           linear(b, ls->query_size, hidden));
    norm_forward(b, MODEL_POST_NORM, slot->middle, slot->rstd_post);
    b->ops->linear_forward(b->device, slot->gate, ls->normed, weight(b, MODEL_GATE), NULL, wide);
    b->ops->linear_forward(b->device, slot->up, ls->normed, weight(b, MODEL_UP), NULL, wide);
}

/* middle, gate, up -> y */
static void narrow(const struct block *b, compute_t *y)
{
    const struct layers_slot *slot = b->slot;
    uint64_t inner = b->config->intermediate_size;
    b->ops->activation_forward(b->device,
                               &(struct device_activation_forward){.activation = DEVICE_SILU,
                                                                   .elements = b->rows * inner,
                                                                   .y = b->layers->wide,
                                                                   .gate = slot->gate,
                                                                   .up = slot->up});
    b->ops->linear_forward(b->device, y, b->layers->wide, weight(b, MODEL_DOWN), slot->middle,
                           linear(b, inner, b->config->hidden_size));
}

/* All that backward needs; the last product is not among it. */
static void fill_slot(const struct block *b, const struct layers_batch *batch, const compute_t *x)
{
    struct layers_slot *slot = b->slot;
    project(b, x, batch->position);
    b->ops->attention_forward(b->device, slot->attended, slot->lse, slot->q, slot->k, slot->v,
                              layers_attention(b->layers, batch));
    widen(b, x);
}

void layers_block_forward(struct layers *layers, uint64_t layer, const compute_t *weights,
                          const struct layers_batch *batch, const compute_t *x_in, compute_t *x_out,
                          int64_t slot)
{
    struct block b = block_of(layers, layer, weights, slot);
    fill_slot(&b, batch, x_in);
    narrow(&b, x_out);
}

/* dx through a norm, added to what flows past it; the norm's output is written again. */
static void norm_backward(const struct block *b, enum model_role role, const compute_t *x,
                          const float *rstd, compute_t *dx)
{
    const struct layers *ls = b->layers;
    b->ops->norm_backward(b->device,
                          &(struct device_norm_backward){.norm = DEVICE_RMSNORM,
                                                         .dx = dx,
                                                         .dw = gradient(b, role),
                                                         .y_again = ls->normed,
                                                         .dy = ls->normed,
                                                         .x = x,
                                                         .w = weight(b, role),
                                                         .rstd = rstd,
                                                         .residual = dx,
                                                         .scratch = ls->norm_scratch,
                                                         .rows = b->rows,
                                                         .width = b->config->hidden_size});
}

/* dx: of y -> of the middle. Leaves the derivatives of gate and up in their places in the slot. */
static void mlp_backward(const struct block *b, compute_t *dx)
{
    const struct layers *ls = b->layers;
    struct layers_slot *slot = b->slot;
    uint64_t hidden = b->config->hidden_size, inner = b->config->intermediate_size;
    struct device_linear wide = linear(b, hidden, inner);
    b->ops->linear_backward_input(b->device, ls->wide, DEVICE_SET, dx, weight(b, MODEL_DOWN),
                                  linear(b, inner, hidden));
    b->ops->activation_backward(b->device,
                                &(struct device_activation_backward){.activation = DEVICE_SILU,
                                                                     .elements = b->rows * inner,
                                                                     .dgate = slot->gate,
                                                                     .dup = slot->up,
                                                                     .y = ls->wide,
                                                                     .dy = ls->wide,
                                                                     .gate = slot->gate,
                                                                     .up = slot->up});
    struct device_weight_gradient down = {.dw = gradient(b, MODEL_DOWN), .dy = dx, .out = hidden};
    b->ops->linear_backward_weight(b->device, &down, 1, ls->wide, b->rows, inner);
    b->ops->linear_backward_input(b->device, ls->normed, DEVICE_SET, slot->gate,
                                  weight(b, MODEL_GATE), wide);
    b->ops->linear_backward_input(b->device, ls->normed, DEVICE_ADD, slot->up, weight(b, MODEL_UP),
                                  wide);
    norm_backward(b, MODEL_POST_NORM, slot->middle, slot->rstd_post, dx);
    struct device_weight_gradient both[] = {
        {.dw = gradient(b, MODEL_GATE), .dy = slot->gate, .out = inner},
        {.dw = gradient(b, MODEL_UP), .dy = slot->up, .out = inner}};
    b->ops->linear_backward_weight(b->device, both, 2, ls->normed, b->rows, hidden);
}

/* dx: of the middle -> of x */
static void attention_backward(const struct block *b, const struct layers_batch *batch,
                               const compute_t *x, compute_t *dx)
{
    const struct layers *ls = b->layers;
    const struct layers_slot *slot = b->slot;
    uint64_t hidden = b->config->hidden_size;
    compute_t *dout = ls->wide;
    compute_t *dq = device_at(b->device, dout, b->rows * ls->query_size);
    compute_t *dk = device_at(b->device, dq, b->rows * ls->query_size);
    compute_t *dv = device_at(b->device, dk, b->rows * ls->key_size);
    b->ops->linear_backward_input(b->device, dout, DEVICE_SET, dx, weight(b, MODEL_O),
                                  linear(b, ls->query_size, hidden));
    struct device_weight_gradient out = {.dw = gradient(b, MODEL_O), .dy = dx, .out = hidden};
    b->ops->linear_backward_weight(b->device, &out, 1, slot->attended, b->rows, ls->query_size);
    b->ops->attention_backward(
        b->device,
        &(struct device_attention_backward){.dq = dq,
                                            .dk = dk,
                                            .dv = dv,
                                            .dout = dout,
                                            .out = slot->attended,
                                            .lse = slot->lse,
                                            .q = slot->q,
                                            .k = slot->k,
                                            .v = slot->v,
                                            .scratch = ls->attention_scratch},
        layers_attention(ls, batch));
    rope(b, batch->position, DEVICE_BACKWARD, dq, dk);
    struct device_linear query = linear(b, hidden, ls->query_size);
    struct device_linear key = linear(b, hidden, ls->key_size);
    b->ops->linear_backward_input(b->device, ls->normed, DEVICE_SET, dq, weight(b, MODEL_Q), query);
    b->ops->linear_backward_input(b->device, ls->normed, DEVICE_ADD, dk, weight(b, MODEL_K), key);
    b->ops->linear_backward_input(b->device, ls->normed, DEVICE_ADD, dv, weight(b, MODEL_V), key);
    norm_backward(b, MODEL_INPUT_NORM, x, slot->rstd_input, dx);
    struct device_weight_gradient three[] = {
        {.dw = gradient(b, MODEL_Q), .dy = dq, .out = ls->query_size},
        {.dw = gradient(b, MODEL_K), .dy = dk, .out = ls->key_size},
        {.dw = gradient(b, MODEL_V), .dy = dv, .out = ls->key_size}};
    b->ops->linear_backward_weight(b->device, three, 3, ls->normed, b->rows, hidden);
}

void layers_block_backward(struct layers *layers, uint64_t layer, const compute_t *weights,
                           float *gradients, const struct layers_batch *batch,
                           const compute_t *x_in, compute_t *dx, int64_t slot)
{
    CHECK(!layers->shape.forward_only);
    struct block b = block_of(layers, layer, weights, slot);
    b.gradients = gradients;
    if (slot == LAYERS_NO_SLOT)
        fill_slot(&b, batch, x_in);
    mlp_backward(&b, dx);
    attention_backward(&b, batch, x_in, dx);
}

void layers_block_decode(struct layers *layers, uint64_t layer, const compute_t *weights,
                         const struct layers_decode *rows, compute_t *x, compute_t *cache_k,
                         compute_t *cache_v)
{
    CHECK(rows->rows <= layers->rows && rows->context <= layers->shape.context_max);
    struct block b = block_of(layers, layer, weights, LAYERS_NO_SLOT);
    b.rows = rows->rows;
    struct layers_slot *slot = b.slot;
    project(&b, x, rows->position);
    b.ops->attention_decode(b.device,
                            &(struct device_decode_arrays){.out = slot->attended,
                                                           .cache_k = cache_k,
                                                           .cache_v = cache_v,
                                                           .q = slot->q,
                                                           .k = slot->k,
                                                           .v = slot->v},
                            (struct device_decode){.rows = rows->rows,
                                                   .context = rows->context,
                                                   .query_heads = b.config->n_heads,
                                                   .key_heads = b.config->n_kv_heads,
                                                   .head_dim = b.config->head_dim,
                                                   .scale = layers->scale,
                                                   .sequence = rows->sequence,
                                                   .position = rows->position});
    widen(&b, x);
    narrow(&b, x);
}
