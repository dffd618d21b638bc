/*
 * The decoder block. In brackets what the options of model/config.h add:
 *
 *     h = norm(x) w_in;    q, k, v = h Wq^T, h Wk^T, h Wv^T [+ b];   [q, k = norm(q), norm(k) per
 *     head;]   [q, k = rope(q), rope(k)]
 *     a = attention(q, k, v) Wo^T [+ b];    m = x + a [norm(a)]
 *     h = norm(m) w_post;  g, u = h Wg^T, h Wu^T [+ b];   f = (act(g) u) Wd^T [act(u) without a
 * gate;
 *     + b];    y = m + f [norm(f)]
 *
 * In a sparse block f is, of each row, the sum over its K experts e of w_e MLP_e(h), with w from
 * the router: softmax(h Wr^T), as gpu_worker/device.h says.
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
    uint64_t inner; /* F */
    int sparse;
    const compute_t *weights;
    float *gradients; /* NULL in forward */
    double *balance;  /* of the batch, or NULL */
    struct layers_slot *slot;
};

static struct block block_of(struct layers *layers, uint64_t layer, const compute_t *weights,
                             int64_t slot)
{
    CHECK(slot == LAYERS_NO_SLOT || (slot >= 0 && (uint64_t)slot < layers->shape.saved_slots));
    uint64_t index = slot == LAYERS_NO_SLOT ? layers->shape.saved_slots : (uint64_t)slot;
    const struct model_layer *l = &layers->layout->layers[layer];
    return (struct block){.layers = layers,
                          .device = layers->device,
                          .ops = layers->device->ops,
                          .config = &layers->layout->config,
                          .layer = layer,
                          .rows = layers->rows,
                          .inner = layers->layout->config.intermediate_size,
                          .sparse = l->n_experts > 0,
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

/* ---- linear layers ---- */

/* A linear layer of the block: its weight's role, and what it leads from and to. */
struct projection {
    enum model_role role, bias;
    uint64_t in, out;
};

static struct projection projection(const struct block *b, enum model_role role)
{
    uint64_t hidden = b->config->hidden_size, inner = b->inner;
    uint64_t query = b->layers->query_size, key = b->layers->key_size;
    switch (role) {
    case MODEL_Q:
        return (struct projection){role, MODEL_Q_BIAS, hidden, query};
    case MODEL_K:
        return (struct projection){role, MODEL_K_BIAS, hidden, key};
    case MODEL_V:
        return (struct projection){role, MODEL_V_BIAS, hidden, key};
    case MODEL_O:
        return (struct projection){role, MODEL_O_BIAS, query, hidden};
    case MODEL_ROUTER:
        return (struct projection){role, MODEL_ROLES, hidden, b->config->n_experts};
    case MODEL_GATE:
        return (struct projection){role, MODEL_GATE_BIAS, hidden, inner};
    case MODEL_UP:
        return (struct projection){role, MODEL_UP_BIAS, hidden, inner};
    default:
        CHECK(role == MODEL_DOWN);
        return (struct projection){role, MODEL_DOWN_BIAS, inner, hidden};
    }
}

static struct device_linear linear(const struct block *b, const struct projection *p)
{
    return (struct device_linear){.rows = b->rows,
                                  .in = p->in,
                                  .out = p->out,
                                  .layout = layers_linear_layout(b->layers),
                                  .stride = layers_linear_stride(b->layers, b->layer, p->role),
                                  .bias = weight(b, p->bias)};
}

/* y = x W^T [+ b], or residual + that */
static void forward(const struct block *b, enum model_role role, compute_t *y, const compute_t *x,
                    const compute_t *residual)
{
    struct projection p = projection(b, role);
    b->ops->linear_forward(b->device, y, x, weight(b, role), residual, linear(b, &p));
}

/* dx = or += dy W */
static void backward_input(const struct block *b, enum model_role role, compute_t *dx,
                           enum device_write write, const compute_t *dy)
{
    struct projection p = projection(b, role);
    b->ops->linear_backward_input(b->device, dx, write, dy, weight(b, role), linear(b, &p));
}

/* Gradients of n layers that read the same x. */
static void backward_weights(const struct block *b, const enum model_role *roles,
                             compute_t *const *dy, uint64_t n, const compute_t *x)
{
    struct device_weight_gradient gradients[3];
    uint64_t in = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct projection p = projection(b, roles[i]);
        struct device_linear l = linear(b, &p);
        in = p.in;
        gradients[i] = (struct device_weight_gradient){.dw = gradient(b, p.role),
                                                       .dy = dy[i],
                                                       .out = p.out,
                                                       .layout = l.layout,
                                                       .stride = l.stride};
        if (l.bias)
            b->ops->linear_backward_bias(b->device, gradient(b, p.bias), dy[i], b->rows, p.out);
    }
    b->ops->linear_backward_weight(b->device, gradients, n, x, b->rows, in);
}

/* ---- norms ---- */

/* A norm of the block: of rows of the hidden width, or of each head. */
struct norm {
    enum model_role role, bias;
    uint64_t rows, width;
    const compute_t *x;
    float *rstd;
};

static struct norm norm_of_rows(const struct block *b, enum model_role role, const compute_t *x,
                                float *rstd)
{
    enum model_role bias = role == MODEL_INPUT_NORM ? MODEL_INPUT_NORM_BIAS : MODEL_POST_NORM_BIAS;
    return (struct norm){role, bias, b->rows, b->config->hidden_size, x, rstd};
}

static struct norm norm_of_heads(const struct block *b, enum model_role role, uint64_t heads,
                                 const compute_t *x, float *rstd)
{
    return (struct norm){role, MODEL_ROLES, b->rows * heads, b->config->head_dim, x, rstd};
}

static int has_bias(const struct block *b, const struct norm *n)
{
    return b->config->norm == MODEL_NORM_LAYER && n->bias != MODEL_ROLES;
}

static void norm_forward(const struct block *b, const struct norm *n, compute_t *y,
                         const compute_t *residual)
{
    b->ops->norm_forward(
        b->device, &(struct device_norm_forward){.norm = b->layers->norm,
                                                 .epsilon = (float)b->config->norm_eps,
                                                 .rows = n->rows,
                                                 .width = n->width,
                                                 .y = y,
                                                 .rstd = n->rstd,
                                                 .x = n->x,
                                                 .w = weight(b, n->role),
                                                 .bias = has_bias(b, n) ? weight(b, n->bias) : NULL,
                                                 .residual = residual});
}

/* dx = [residual +] derivative by the norm's input; y_again as in the device's operation. */
static void norm_backward(const struct block *b, const struct norm *n, compute_t *dx,
                          const compute_t *dy, const compute_t *residual, compute_t *y_again)
{
    int biased = has_bias(b, n);
    b->ops->norm_backward(
        b->device, &(struct device_norm_backward){.norm = b->layers->norm,
                                                  .dx = dx,
                                                  .dw = gradient(b, n->role),
                                                  .dbias = biased ? gradient(b, n->bias) : NULL,
                                                  .y_again = y_again,
                                                  .dy = dy,
                                                  .x = n->x,
                                                  .w = weight(b, n->role),
                                                  .bias = biased ? weight(b, n->bias) : NULL,
                                                  .rstd = n->rstd,
                                                  .residual = residual,
                                                  .scratch = b->layers->norm_scratch,
                                                  .rows = n->rows,
                                                  .width = n->width});
}

/* ---- forward ---- */

static void rope(const struct block *b, const int32_t *position, enum device_direction direction,
                 compute_t *q, compute_t *k)
{
    enum model_reach reach =
        model_config_reach(b->config, b->layers->layout->layers[b->layer].block);
    struct device_rope args = {.rows = b->rows,
                               .heads = b->config->n_heads,
                               .head_dim = b->config->head_dim,
                               .cosine = b->layers->cosine[reach],
                               .sine = b->layers->sine[reach],
                               .position = position,
                               .rotated = b->config->rope_dim};
    if (!b->config->rope_dim)
        return;
    b->ops->rope(b->device, q, args, direction);
    args.heads = b->config->n_kv_heads;
    b->ops->rope(b->device, k, args, direction);
}

/* slot's q_raw, k_raw -> q, k */
static void norm_heads(const struct block *b)
{
    const struct layers_slot *slot = b->slot;
    struct norm q = norm_of_heads(b, MODEL_Q_NORM, b->config->n_heads, slot->q_raw, slot->rstd_q);
    struct norm k =
        norm_of_heads(b, MODEL_K_NORM, b->config->n_kv_heads, slot->k_raw, slot->rstd_k);
    norm_forward(b, &q, slot->q, NULL);
    norm_forward(b, &k, slot->k, NULL);
}

/* x (rows,C) -> slot's q, k, v */
static void project(const struct block *b, const compute_t *x, const int32_t *position)
{
    const struct layers_slot *slot = b->slot;
    compute_t *normed = b->layers->normed;
    struct norm input = norm_of_rows(b, MODEL_INPUT_NORM, x, slot->rstd_input);
    norm_forward(b, &input, normed, NULL);
    forward(b, MODEL_Q, b->config->qk_norm ? slot->q_raw : slot->q, normed, NULL);
    forward(b, MODEL_K, b->config->qk_norm ? slot->k_raw : slot->k, normed, NULL);
    forward(b, MODEL_V, slot->v, normed, NULL);
    if (b->config->qk_norm)
        norm_heads(b);
    rope(b, position, DEVICE_FORWARD, slot->q, slot->k);
}

static struct norm attention_out_norm(const struct block *b)
{
    return norm_of_rows(b, MODEL_ATTENTION_OUT_NORM, b->slot->attention_out,
                        b->slot->rstd_attention_out);
}

static struct norm mlp_out_norm(const struct block *b)
{
    return norm_of_rows(b, MODEL_MLP_OUT_NORM, b->slot->mlp_out, b->slot->rstd_mlp_out);
}

static struct norm post_norm(const struct block *b)
{
    return norm_of_rows(b, MODEL_POST_NORM, b->slot->middle, b->slot->rstd_post);
}

/* gate, up -> to = [residual +] f */
static void narrow(const struct block *b, compute_t *to, const compute_t *residual)
{
    const struct layers_slot *slot = b->slot;
    int plain = b->config->plain_mlp != 0;
    b->ops->activation_forward(
        b->device, &(struct device_activation_forward){.activation = b->layers->activation,
                                                       .elements = b->rows * b->inner,
                                                       .y = b->layers->wide,
                                                       .gate = plain ? slot->up : slot->gate,
                                                       .up = plain ? NULL : slot->up});
    forward(b, MODEL_DOWN, to, b->layers->wide, residual);
}

/* ---- experts ---- */

static struct device_router router_of(const struct block *b)
{
    return (struct device_router){
        .rows = b->rows,
        .experts = b->config->n_experts,
        .top_k = b->config->experts_per_token,
        .width = b->config->hidden_size,
        .scale = b->config->norm_topk ? DEVICE_ROUTER_NORMALIZED : DEVICE_ROUTER_AS_IS,
        .round = b->config->router_rounded ? DEVICE_ROUTER_ROUNDED : DEVICE_ROUTER_F32};
}

/* One expert at work on its rows. */
struct expert {
    struct block block; /* its layer's, and its part of the slot's gate and up */
    struct layers_slot part;
    const int32_t *slots; /* (rows) */
};

/* layers->host_first says which rows; 0 when there are none. */
static int expert_open(const struct block *b, uint64_t index, struct expert *e)
{
    const struct layers *ls = b->layers;
    const struct model_layer *layer = &ls->layout->layers[b->layer + 1 + index];
    uint64_t first = (uint64_t)ls->host_first[index];
    uint64_t inner = b->config->expert_size;
    *e = (struct expert){.block = *b, .part = *b->slot, .slots = b->slot->slots + first};
    e->part.gate = device_at(b->device, b->slot->gate, first * inner);
    e->part.up = device_at(b->device, b->slot->up, first * inner);
    e->block.layer = b->layer + 1 + index;
    e->block.rows = (uint64_t)ls->host_first[index + 1] - first;
    e->block.inner = inner;
    e->block.weights = device_at(b->device, b->weights, layer->start);
    e->block.gradients = b->gradients ? b->gradients + layer->start : NULL;
    return e->block.rows > 0;
}

/* The expert's block reads and writes its part of the slot. */
static const struct block *expert_block(struct expert *e)
{
    e->block.slot = &e->part;
    return &e->block;
}

static void fetch_first(const struct block *b)
{
    b->ops->copy_out(b->device, b->layers->host_first, b->slot->first,
                     (b->config->n_experts + 1) * sizeof *b->slot->first);
}

static void gather(const struct block *b, const struct expert *e)
{
    b->ops->expert_gather(b->device, b->layers->expert_in, b->layers->normed, e->slots,
                          e->block.rows, router_of(b));
}

/* normed -> where its rows go, and gate and up of each expert */
static void spread(const struct block *b)
{
    const struct layers_slot *slot = b->slot;
    forward(b, MODEL_ROUTER, slot->router_logits, b->layers->normed, NULL);
    b->ops->router_forward(
        b->device,
        &(struct device_router_forward){.logits = slot->router_logits,
                                        .probabilities = b->layers->probabilities,
                                        .weights = slot->router_weights,
                                        .experts = slot->experts,
                                        .slots = slot->slots,
                                        .first = slot->first,
                                        .balance = b->balance},
        router_of(b));
    fetch_first(b);
    for (uint64_t index = 0; index < b->config->n_experts; index++) {
        struct expert e;
        if (!expert_open(b, index, &e))
            continue;
        gather(b, &e);
        forward(expert_block(&e), MODEL_GATE, e.part.gate, b->layers->expert_in, NULL);
        forward(expert_block(&e), MODEL_UP, e.part.up, b->layers->expert_in, NULL);
    }
}

/* gate, up of each expert -> y = middle + f */
static void mix(const struct block *b, compute_t *y)
{
    const struct layers *ls = b->layers;
    uint64_t elements = b->rows * b->config->hidden_size;
    uint64_t bytes = elements * b->device->compute_bytes;
    b->ops->zero(b->device, ls->mixed, bytes);
    for (uint64_t index = 0; index < b->config->n_experts; index++) {
        struct expert e;
        if (!expert_open(b, index, &e))
            continue;
        narrow(expert_block(&e), ls->expert_out, NULL);
        b->ops->expert_scatter(b->device, ls->mixed, ls->expert_out, b->slot->router_weights,
                               e.slots, e.block.rows, router_of(b));
    }
    b->ops->copy(b->device, y, b->slot->middle, bytes);
    b->ops->accumulate(b->device, y, ls->mixed, elements);
}

/* slot's attended -> middle, gate, up; with a norm behind the MLP also mlp_out */
static void widen(const struct block *b, const compute_t *x)
{
    const struct layers_slot *slot = b->slot;
    compute_t *normed = b->layers->normed;
    if (b->config->post_norms) {
        struct norm out = attention_out_norm(b);
        forward(b, MODEL_O, slot->attention_out, slot->attended, NULL);
        norm_forward(b, &out, slot->middle, x);
    } else {
        forward(b, MODEL_O, slot->middle, slot->attended, x);
    }
    struct norm post = post_norm(b);
    norm_forward(b, &post, normed, NULL);
    if (b->sparse) {
        spread(b);
        return;
    }
    if (!b->config->plain_mlp)
        forward(b, MODEL_GATE, slot->gate, normed, NULL);
    forward(b, MODEL_UP, slot->up, normed, NULL);
    if (b->config->post_norms)
        narrow(b, slot->mlp_out, NULL);
}

/* middle, gate, up or mlp_out -> y */
static void finish(const struct block *b, compute_t *y)
{
    if (b->sparse) {
        mix(b, y);
        return;
    }
    if (!b->config->post_norms) {
        narrow(b, y, b->slot->middle);
        return;
    }
    struct norm out = mlp_out_norm(b);
    norm_forward(b, &out, y, b->slot->middle);
}

/* All that backward needs, but rstd_mlp_out, which finish() writes. */
static void fill_slot(const struct block *b, const struct layers_batch *batch, const compute_t *x)
{
    const struct layers_slot *slot = b->slot;
    project(b, x, batch->position);
    b->ops->attention_forward(b->device, slot->attended, slot->lse, slot->q, slot->k, slot->v,
                              layers_attention(b->layers, batch, b->layer));
    widen(b, x);
}

void layers_block_forward(struct layers *layers, uint64_t layer, const compute_t *weights,
                          const struct layers_batch *batch, const compute_t *x_in, compute_t *x_out,
                          int64_t slot)
{
    struct block b = block_of(layers, layer, weights, slot);
    b.balance = batch->balance;
    fill_slot(&b, batch, x_in);
    finish(&b, x_out);
}

/* ---- backward ---- */

/* The derivative by what attention or MLP gave, from dx, the one by the stream it was added to. */
static compute_t *branch_of(const struct block *b, struct norm (*norm)(const struct block *),
                            compute_t *dx)
{
    if (!b->config->post_norms)
        return dx;
    struct norm out = norm(b);
    norm_backward(b, &out, b->layers->branch, dx, NULL, NULL);
    return b->layers->branch;
}

/* dy of an MLP's output -> the derivatives of gate and up in their places in the slot, and that of
 * down's weight. */
static void narrow_backward(const struct block *b, compute_t *dy)
{
    static const enum model_role down[] = {MODEL_DOWN};
    const struct layers *ls = b->layers;
    const struct layers_slot *slot = b->slot;
    int plain = b->config->plain_mlp != 0;
    compute_t *input = plain ? slot->up : slot->gate;
    backward_input(b, MODEL_DOWN, ls->wide, DEVICE_SET, dy);
    b->ops->activation_backward(
        b->device, &(struct device_activation_backward){.activation = ls->activation,
                                                        .elements = b->rows * b->inner,
                                                        .dgate = input,
                                                        .dup = plain ? NULL : slot->up,
                                                        .y = ls->wide,
                                                        .dy = ls->wide,
                                                        .gate = input,
                                                        .up = plain ? NULL : slot->up});
    backward_weights(b, down, &dy, 1, ls->wide);
}

/* The derivatives of gate and up -> dx of what they read. */
static void widen_backward_input(const struct block *b, compute_t *dx)
{
    int plain = b->config->plain_mlp != 0;
    backward_input(b, plain ? MODEL_UP : MODEL_GATE, dx, DEVICE_SET,
                   plain ? b->slot->up : b->slot->gate);
    if (!plain)
        backward_input(b, MODEL_UP, dx, DEVICE_ADD, b->slot->up);
}

static void widen_backward_weights(const struct block *b, const compute_t *x)
{
    static const enum model_role both[] = {MODEL_GATE, MODEL_UP}, alone[] = {MODEL_UP};
    compute_t *const dy[] = {b->slot->gate, b->slot->up};
    if (b->config->plain_mlp)
        backward_weights(b, alone, dy + 1, 1, x);
    else
        backward_weights(b, both, dy, 2, x);
}

/* The rows of one expert: dx, the derivative by f -> its part of `mixed`, by what was read. */
static void expert_backward(const struct block *b, struct expert *e, const compute_t *dx)
{
    const struct layers *ls = b->layers;
    const struct block *expert = expert_block(e);
    gather(b, e);
    narrow(expert, ls->expert_out, NULL);
    b->ops->expert_scatter_backward(
        b->device,
        &(struct device_expert_scatter_backward){.dfrom = ls->expert_out,
                                                 .dweights = ls->router_dweights,
                                                 .dto = dx,
                                                 .from = ls->expert_out,
                                                 .weights = b->slot->router_weights,
                                                 .slots = e->slots,
                                                 .n = e->block.rows},
        router_of(b));
    narrow_backward(expert, ls->expert_out);
    widen_backward_weights(expert, ls->expert_in);
    widen_backward_input(expert, ls->expert_out);
    b->ops->expert_scatter(b->device, ls->mixed, ls->expert_out, NULL, e->slots, e->block.rows,
                           router_of(b));
}

/* dx: of y -> of the middle. */
static void experts_backward(const struct block *b, const float *balance_slope, compute_t *dx)
{
    static const enum model_role router[] = {MODEL_ROUTER};
    const struct layers *ls = b->layers;
    compute_t *dlogits = b->slot->router_logits;
    struct norm post = post_norm(b);
    norm_forward(b, &post, ls->normed, NULL);
    fetch_first(b);
    b->ops->zero(b->device, ls->mixed, b->rows * b->config->hidden_size * b->device->compute_bytes);
    for (uint64_t index = b->config->n_experts; index-- > 0;) {
        struct expert e;
        if (expert_open(b, index, &e))
            expert_backward(b, &e, dx);
    }
    b->ops->router_backward(b->device,
                            &(struct device_router_backward){.dlogits = dlogits,
                                                             .dweights = ls->router_dweights,
                                                             .logits = dlogits,
                                                             .experts = b->slot->experts,
                                                             .balance_slope = balance_slope},
                            router_of(b));
    backward_input(b, MODEL_ROUTER, ls->mixed, DEVICE_ADD, dlogits);
    backward_weights(b, router, &dlogits, 1, ls->normed);
    norm_backward(b, &post, dx, ls->mixed, dx, NULL);
}

/* dx: of y -> of the middle. */
static void mlp_backward(const struct block *b, compute_t *dx)
{
    const struct layers *ls = b->layers;
    narrow_backward(b, branch_of(b, mlp_out_norm, dx));
    widen_backward_input(b, ls->normed);
    struct norm post = post_norm(b);
    norm_backward(b, &post, dx, ls->normed, dx, ls->normed);
    widen_backward_weights(b, ls->normed);
}

/* dq, dk: of what rope gave -> of what the linears gave */
static void heads_backward(const struct block *b, const int32_t *position, compute_t *dq,
                           compute_t *dk)
{
    const struct layers_slot *slot = b->slot;
    rope(b, position, DEVICE_BACKWARD, dq, dk);
    if (!b->config->qk_norm)
        return;
    struct norm q = norm_of_heads(b, MODEL_Q_NORM, b->config->n_heads, slot->q_raw, slot->rstd_q);
    struct norm k =
        norm_of_heads(b, MODEL_K_NORM, b->config->n_kv_heads, slot->k_raw, slot->rstd_k);
    norm_backward(b, &q, dq, dq, NULL, NULL);
    norm_backward(b, &k, dk, dk, NULL, NULL);
}

/* dx: of the middle -> of x */
static void attention_backward(const struct block *b, const struct layers_batch *batch,
                               const compute_t *x, compute_t *dx)
{
    static const enum model_role out[] = {MODEL_O}, three[] = {MODEL_Q, MODEL_K, MODEL_V};
    const struct layers *ls = b->layers;
    const struct layers_slot *slot = b->slot;
    compute_t *dout = ls->wide;
    compute_t *dq = device_at(b->device, dout, b->rows * ls->query_size);
    compute_t *dk = device_at(b->device, dq, b->rows * ls->query_size);
    compute_t *dv = device_at(b->device, dk, b->rows * ls->key_size);
    compute_t *da = branch_of(b, attention_out_norm, dx);
    backward_input(b, MODEL_O, dout, DEVICE_SET, da);
    backward_weights(b, out, &da, 1, slot->attended);
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
        layers_attention(ls, batch, b->layer));
    heads_backward(b, batch->position, dq, dk);
    backward_input(b, MODEL_Q, ls->normed, DEVICE_SET, dq);
    backward_input(b, MODEL_K, ls->normed, DEVICE_ADD, dk);
    backward_input(b, MODEL_V, ls->normed, DEVICE_ADD, dv);
    struct norm input = norm_of_rows(b, MODEL_INPUT_NORM, x, slot->rstd_input);
    norm_backward(b, &input, dx, ls->normed, dx, ls->normed);
    compute_t *const dy[] = {dq, dk, dv};
    backward_weights(b, three, dy, 3, ls->normed);
}

void layers_block_backward(struct layers *layers, uint64_t layer, const compute_t *weights,
                           float *gradients, const struct layers_batch *batch,
                           const compute_t *x_in, compute_t *dx, int64_t slot)
{
    CHECK(!layers->shape.forward_only);
    struct block b = block_of(layers, layer, weights, slot);
    b.gradients = gradients;
    if (slot == LAYERS_NO_SLOT) {
        fill_slot(&b, batch, x_in);
        if (b.config->post_norms)
            finish(&b, layers->normed); /* for rstd_mlp_out; the block's output is not wanted */
    }
    if (b.sparse)
        experts_backward(&b, batch->balance_slope, dx);
    else
        mlp_backward(&b, dx);
    attention_backward(&b, batch, x_in, dx);
}

/* ---- decoding ---- */

void layers_block_decode(struct layers *layers, uint64_t layer, const compute_t *weights,
                         const struct layers_decode *rows, compute_t *x, compute_t *cache_k,
                         compute_t *cache_v)
{
    CHECK(rows->rows <= layers->rows && rows->context <= layers->shape.context_max);
    struct block b = block_of(layers, layer, weights, LAYERS_NO_SLOT);
    b.rows = rows->rows;
    struct layers_slot *slot = b.slot;
    struct layers_batch none = {0};
    struct device_attention attention = layers_attention(layers, &none, layer);
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
                                                   .query_heads = attention.query_heads,
                                                   .key_heads = attention.key_heads,
                                                   .head_dim = attention.head_dim,
                                                   .scale = attention.scale,
                                                   .sequence = rows->sequence,
                                                   .position = rows->position,
                                                   .window = attention.window,
                                                   .softcap = attention.softcap});
    widen(&b, x);
    finish(&b, x);
}
