/*
 * Both ends of the model: the embedding, and the final norm + head + cross entropy. The head goes
 * over chunks of LAYERS_HEAD_ROWS tokens, because logits are V / C times as large as x.
 */
#include "gpu_worker/layers_internal.h"
#include "procs/check.h"

/* Rows to look up. */
static struct device_embedding lookup(const struct layers *layers, uint64_t rows,
                                      const int32_t *tokens, const int32_t *position)
{
    const struct model_config *config = &layers->layout->config;
    int learned = config->positions == MODEL_POSITIONS_LEARNED;
    return (struct device_embedding){.rows = rows,
                                     .width = config->hidden_size,
                                     .tokens = tokens,
                                     .positions = learned ? position : NULL,
                                     .scale = (float)config->embedding_scale,
                                     .skipped_token = config->pad_token_id};
}

void layers_embedding_forward(struct layers *layers, const compute_t *weights,
                              const struct layers_batch *batch, compute_t *x_out)
{
    struct device_embedding rows = lookup(layers, layers->rows, batch->tokens, batch->position);
    layers->device->ops->embedding_forward(
        layers->device, x_out, layers_weight(layers, weights, 0, MODEL_EMBED),
        layers_weight(layers, weights, 0, MODEL_POSITIONS), &rows);
}

void layers_embedding_backward(struct layers *layers, float *gradients,
                               const struct layers_batch *batch, const compute_t *dx)
{
    struct device_embedding rows = lookup(layers, layers->rows, batch->tokens, batch->position);
    layers->device->ops->embedding_backward(
        layers->device, layers_gradient(layers, gradients, 0, MODEL_EMBED),
        layers_gradient(layers, gradients, 0, MODEL_POSITIONS), dx, &rows);
}

void layers_embedding_decode(struct layers *layers, const compute_t *weights,
                             const struct layers_decode *decode, compute_t *x)
{
    CHECK(decode->rows <= layers->rows);
    struct device_embedding rows = lookup(layers, decode->rows, decode->tokens, decode->position);
    layers->device->ops->embedding_forward(
        layers->device, x, layers_weight(layers, weights, 0, MODEL_EMBED),
        layers_weight(layers, weights, 0, MODEL_POSITIONS), &rows);
}

/* Some rows of a microbatch on their way through the head. */
struct chunk {
    struct layers *layers;
    const struct layers_head *head;
    uint64_t start, rows;
    const compute_t *x; /* (rows,C) */
    compute_t *normed;  /* (rows,C) */
};

static struct device_linear chunk_linear(const struct chunk *c)
{
    const struct model_config *config = &c->layers->layout->config;
    return (struct device_linear){
        .rows = c->rows, .in = config->hidden_size, .out = config->vocab_size};
}

/* Norm and logits of the chunk that starts at row `start` of x. */
static struct chunk chunk_logits(struct layers *layers, const struct layers_head *head,
                                 const compute_t *x, uint64_t start, uint64_t end, float *logits)
{
    struct device *device = layers->device;
    const struct model_config *config = &layers->layout->config;
    uint64_t hidden = config->hidden_size, left = end - start;
    struct chunk c = {.layers = layers,
                      .head = head,
                      .start = start,
                      .rows = left < layers->head_rows ? left : layers->head_rows,
                      .x = device_at(device, x, start * hidden),
                      .normed = layers->normed};
    device->ops->norm_forward(
        device,
        &(struct device_norm_forward){.norm = layers->norm,
                                      .epsilon = (float)config->norm_eps,
                                      .rows = c.rows,
                                      .width = hidden,
                                      .y = c.normed,
                                      .rstd = layers->slots[layers->shape.saved_slots].rstd_post,
                                      .x = c.x,
                                      .w = head->norm,
                                      .bias = head->norm_bias});
    device->ops->head_forward(device, logits, c.normed, head->matrix, chunk_linear(&c));
    if (config->final_softcap > 0)
        device->ops->softcap(device, logits, (float)config->final_softcap,
                             c.rows * config->vocab_size);
    return c;
}

static void chunk_loss(const struct chunk *c, const struct layers_batch *batch, double loss_scale,
                       enum device_loss loss)
{
    struct layers *layers = c->layers;
    struct device_cross_entropy shape = {.rows = c->rows,
                                         .vocabulary = layers->layout->config.vocab_size,
                                         .scale = (float)loss_scale,
                                         .softcap = (float)layers->layout->config.final_softcap};
    layers->device->ops->cross_entropy(layers->device, layers->row_loss + c->start, layers->logits,
                                       batch->labels + c->start, shape, loss);
}

static void chunk_backward(const struct chunk *c, compute_t *dx)
{
    struct layers *layers = c->layers;
    struct device *device = layers->device;
    const struct layers_head *head = c->head;
    uint64_t hidden = layers->layout->config.hidden_size;
    compute_t *dnormed = layers->wide; /* (rows,C) */
    device->ops->head_backward_input(device, dnormed, layers->logits, head->matrix,
                                     chunk_linear(c));
    device->ops->head_backward_weight(device, head->matrix_gradient, layers->logits, c->normed,
                                      chunk_linear(c));
    device->ops->norm_backward(
        device,
        &(struct device_norm_backward){.norm = layers->norm,
                                       .dx = device_at(device, dx, c->start * hidden),
                                       .dw = head->norm_gradient,
                                       .dbias = head->norm_bias_gradient,
                                       .dy = dnormed,
                                       .x = c->x,
                                       .w = head->norm,
                                       .bias = head->norm_bias,
                                       .rstd = layers->slots[layers->shape.saved_slots].rstd_post,
                                       .scratch = layers->norm_scratch,
                                       .rows = c->rows,
                                       .width = hidden});
}

/* In token order, so that the sum is the same wherever the losses were computed. */
static double sum_losses(struct layers *layers)
{
    layers->device->ops->copy_out(layers->device, layers->host_loss, layers->row_loss,
                                  layers->rows * sizeof *layers->host_loss);
    double sum = 0;
    for (uint64_t row = 0; row < layers->rows; row++)
        sum += layers->host_loss[row];
    return sum;
}

void layers_head(struct layers *layers, const struct layers_head *head,
                 const struct layers_batch *batch, const compute_t *x, double loss_scale,
                 compute_t *dx, double *loss_sum)
{
    CHECK(!layers->shape.forward_only);
    for (uint64_t row = 0; row < layers->rows; row += layers->head_rows) {
        struct chunk c = chunk_logits(layers, head, x, row, layers->rows, layers->logits);
        chunk_loss(&c, batch, loss_scale, DEVICE_LOSS_AND_GRADIENT);
        chunk_backward(&c, dx);
    }
    *loss_sum = sum_losses(layers);
}

void layers_head_loss(struct layers *layers, const struct layers_head *head,
                      const struct layers_batch *batch, const compute_t *x, double *loss_sum)
{
    for (uint64_t row = 0; row < layers->rows; row += layers->head_rows) {
        struct chunk c = chunk_logits(layers, head, x, row, layers->rows, layers->logits);
        chunk_loss(&c, batch, 0, DEVICE_LOSS_ONLY);
    }
    *loss_sum = sum_losses(layers);
}

void layers_head_logits(struct layers *layers, const struct layers_head *head, const compute_t *x,
                        uint64_t rows, float *logits)
{
    CHECK(rows <= layers->rows);
    uint64_t vocabulary = layers->layout->config.vocab_size;
    for (uint64_t row = 0; row < rows; row += layers->head_rows)
        (void)chunk_logits(layers, head, x, row, rows, logits + row * vocabulary);
}

double layers_balance_loss(struct layers *layers, const double *balance, double coefficient,
                           float *slope)
{
    const struct model_config *config = &layers->layout->config;
    uint64_t n = config->n_experts;
    double counted = (double)(layers->rows * model_config_n_sparse(config)), sum = 0;
    layers->device->ops->copy_out(layers->device, layers->host_balance, balance,
                                  2 * n * sizeof *balance);
    double factor = coefficient * (double)n / (counted * counted);
    for (uint64_t e = 0; e < n; e++) {
        sum += layers->host_balance[e] * layers->host_balance[n + e];
        layers->host_slope[e] = (float)(factor * layers->host_balance[e]);
    }
    layers->device->ops->copy_in(layers->device, slope, layers->host_slope, n * sizeof *slope);
    layers->device->ops->synchronize(layers->device); /* the host's copy is used again */
    return factor * sum;
}
