/*
 * Mixture of experts: the router (softmax, the K largest, a stable sort of the slots by expert),
 * and the ways of rows to an expert and back. Rows of one expert are distinct, so that its scatter
 * runs over them in parallel; the order of additions to one row is that in which the caller walks
 * the experts.
 */
#pragma GCC target("avx2,fma")
#include <math.h>
#include <string.h>

#include "gpu_worker/device_cpu/cpu.h"
#include "gpu_worker/device_cpu/simd.h"
#include "procs/check.h"

enum { ROWS_PER_ITEM = 32, COLUMNS_PER_ITEM = 8 };

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t items_of(uint64_t length, uint64_t per_item)
{
    return (length + per_item - 1) / per_item;
}

/* p (n) = softmax of logits (n) */
static void softmax(float *p, const float *logits, uint64_t n)
{
    float most = logits[0];
    for (uint64_t i = 1; i < n; i++)
        most = logits[i] > most ? logits[i] : most;
    v8 sum = v8_set(0.0f);
    for (uint64_t i = 0; i < n; i += LANES) {
        v8 e = v8_exp(_mm256_sub_ps(v8_load(logits + i, n - i), v8_set(most)));
        if (n - i < LANES)
            e = _mm256_and_ps(e, _mm256_castsi256_ps(v8_mask(n - i)));
        v8_store(p + i, n - i, e);
        sum = _mm256_add_ps(sum, e);
    }
    v8 total = v8_set(v8_sum(sum));
    for (uint64_t i = 0; i < n; i += LANES)
        v8_store(p + i, n - i, _mm256_div_ps(v8_load(p + i, n - i), total));
}

struct router {
    const struct device_router_forward *forward;
    const struct device_router_backward *backward;
    struct device_router shape;
    float *scratch; /* (threads, CPU_SCRATCH_FLOATS) */
    enum rounding rounding;
};

/* The largest p after `last` in the order: larger first, then by index. Where p is not a number,
 * none is; then the k-th. */
static uint64_t next_expert(const float *p, uint64_t experts, int64_t last, uint64_t k)
{
    uint64_t best = experts;
    for (uint64_t e = 0; e < experts; e++) {
        int after = last < 0 || p[e] < p[last] || (p[e] == p[last] && (int64_t)e > last);
        if (after && (best == experts ? p[e] >= 0.0f : p[e] > p[best]))
            best = e;
    }
    return best < experts ? best : k;
}

static void route_row(const struct router *r, uint64_t row)
{
    const struct device_router *shape = &r->shape;
    float *p = r->forward->probabilities + row * shape->experts;
    float *weights = r->forward->weights + row * shape->top_k, total = 0.0f;
    int32_t *experts = r->forward->experts + row * shape->top_k;
    softmax(p, cpu_const_floats(r->forward->logits) + row * shape->experts, shape->experts);
    int64_t last = -1;
    for (uint64_t k = 0; k < shape->top_k; k++) {
        last = (int64_t)next_expert(p, shape->experts, last, k);
        experts[k] = (int32_t)last;
        weights[k] = p[last];
        total += weights[k];
    }
    enum rounding rounding = shape->round == DEVICE_ROUTER_ROUNDED ? r->rounding : ROUND_NONE;
    for (uint64_t k = 0; k < shape->top_k; k++) {
        float weight = shape->scale == DEVICE_ROUTER_NORMALIZED ? weights[k] / total : weights[k];
        weights[k] = _mm256_cvtss_f32(v8_round(v8_set(weight), rounding));
    }
}

static void route_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct router *r = context;
    uint64_t end = least((item + 1) * ROWS_PER_ITEM, r->shape.rows);
    for (uint64_t row = item * ROWS_PER_ITEM; row < end; row++)
        route_row(r, row);
}

/* Counting sort; a slot's rank among those of its expert is by row. */
static void sort_slots(const struct device_router_forward *args, const struct device_router *shape)
{
    uint64_t n = shape->rows * shape->top_k;
    int32_t *first = args->first;
    memset(first, 0, (shape->experts + 1) * sizeof *first);
    for (uint64_t slot = 0; slot < n; slot++)
        first[args->experts[slot] + 1]++;
    for (uint64_t e = 0; e < shape->experts; e++)
        first[e + 1] += first[e];
    for (uint64_t slot = 0; slot < n; slot++) /* moves each expert's start to the next one's */
        args->slots[first[args->experts[slot]]++] = (int32_t)slot;
    for (uint64_t e = shape->experts; e > 0; e--)
        first[e] = first[e - 1];
    first[0] = 0;
}

static void balance_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct router *r = context;
    const struct device_router_forward *args = r->forward;
    uint64_t experts = r->shape.experts, end = least((item + 1) * COLUMNS_PER_ITEM, experts);
    double sums[COLUMNS_PER_ITEM] = {0};
    uint64_t start = item * COLUMNS_PER_ITEM;
    for (uint64_t row = 0; row < r->shape.rows; row++)
        for (uint64_t e = start; e < end; e++)
            sums[e - start] += (double)args->probabilities[row * experts + e];
    for (uint64_t e = start; e < end; e++) {
        args->balance[e] += args->first[e + 1] - args->first[e];
        args->balance[experts + e] += sums[e - start];
    }
}

void cpu_router_forward(struct device *device, const struct device_router_forward *args,
                        struct device_router shape)
{
    CHECK(shape.top_k >= 1 && shape.top_k <= shape.experts &&
          shape.rows * shape.top_k <= INT32_MAX);
    struct threads *threads = cpu_of(device)->threads;
    struct router r = {.forward = args, .shape = shape, .rounding = rounding_of(device)};
    threads_run(threads, items_of(shape.rows, ROWS_PER_ITEM), route_item, &r);
    sort_slots(args, &shape);
    if (args->balance != NULL)
        threads_run(threads, items_of(shape.experts, COLUMNS_PER_ITEM), balance_item, &r);
}

/* dp (E): derivative by each p through the weights of the K chosen. With total = sum of their p and
 * w = p / total, it is (dw - sum(dw w)) / total. */
static void weights_backward(const struct router *r, uint64_t row, const float *p, float *dp)
{
    const struct device_router *shape = &r->shape;
    const float *dw = r->backward->dweights + row * shape->top_k;
    const int32_t *experts = r->backward->experts + row * shape->top_k;
    float total = 0.0f, dot = 0.0f;
    memset(dp, 0, shape->experts * sizeof *dp);
    for (uint64_t k = 0; k < shape->top_k; k++)
        total += p[experts[k]];
    for (uint64_t k = 0; k < shape->top_k; k++)
        dot += dw[k] * (p[experts[k]] / total);
    for (uint64_t k = 0; k < shape->top_k; k++)
        dp[experts[k]] = shape->scale == DEVICE_ROUTER_NORMALIZED ? (dw[k] - dot) / total : dw[k];
}

static float dot_product(const float *a, const float *b, uint64_t n)
{
    v8 sum = v8_set(0.0f);
    for (uint64_t i = 0; i < n; i += LANES)
        sum = v8_fma(v8_load(a + i, n - i), v8_load(b + i, n - i), sum);
    return v8_sum(sum);
}

/* softmax's derivative: p (dp - sum(dp p)) */
static inline v8 softmax_backward(v8 p, v8 dp, float dot, enum rounding rounding)
{
    return v8_round(_mm256_mul_ps(p, _mm256_sub_ps(dp, v8_set(dot))), rounding);
}

static void router_backward_row(const struct router *r, uint64_t row, float *p, float *dp)
{
    uint64_t experts = r->shape.experts;
    const float *slope = r->backward->balance_slope;
    float *dlogits = cpu_floats(r->backward->dlogits) + row * experts;
    softmax(p, cpu_const_floats(r->backward->logits) + row * experts, experts);
    weights_backward(r, row, p, dp);
    float dot = dot_product(p, dp, experts);
    float slope_dot = slope == NULL ? 0.0f : dot_product(p, slope, experts);
    for (uint64_t i = 0; i < experts; i += LANES) {
        uint64_t left = experts - i;
        v8 pi = v8_load(p + i, left);
        v8 d = softmax_backward(pi, v8_load(dp + i, left), dot, r->rounding);
        if (slope != NULL) {
            v8 balance = softmax_backward(pi, v8_load(slope + i, left), slope_dot, r->rounding);
            d = v8_round(_mm256_add_ps(balance, d), r->rounding);
        }
        v8_store(dlogits + i, left, d);
    }
}

static void router_backward_item(void *context, uint64_t item, uint32_t thread)
{
    const struct router *r = context;
    float *p = r->scratch + (uint64_t)thread * CPU_SCRATCH_FLOATS;
    uint64_t end = least((item + 1) * ROWS_PER_ITEM, r->shape.rows);
    for (uint64_t row = item * ROWS_PER_ITEM; row < end; row++)
        router_backward_row(r, row, p, p + r->shape.experts);
}

void cpu_router_backward(struct device *device, const struct device_router_backward *args,
                         struct device_router shape)
{
    CHECK(2 * shape.experts <= CPU_SCRATCH_FLOATS);
    struct router r = {.backward = args,
                       .shape = shape,
                       .scratch = cpu_of(device)->scratch,
                       .rounding = rounding_of(device)};
    threads_run(cpu_of(device)->threads, items_of(shape.rows, ROWS_PER_ITEM), router_backward_item,
                &r);
}

/* ---- the rows of one expert ---- */

struct expert {
    float *to;
    const float *from, *weights;
    const int32_t *slots;
    uint64_t n;
    struct device_router shape;
    const struct device_expert_scatter_backward *backward;
    enum rounding rounding;
};

static void gather_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct expert *e = context;
    uint64_t width = e->shape.width, end = least((item + 1) * ROWS_PER_ITEM, e->n);
    for (uint64_t i = item * ROWS_PER_ITEM; i < end; i++)
        memcpy(e->to + i * width, e->from + (uint64_t)e->slots[i] / e->shape.top_k * width,
               width * sizeof(float));
}

void cpu_expert_gather(struct device *device, compute_t *to, const compute_t *from,
                       const int32_t *slots, uint64_t n, struct device_router shape)
{
    struct expert e = {.to = cpu_floats(to),
                       .from = cpu_const_floats(from),
                       .slots = slots,
                       .n = n,
                       .shape = shape};
    threads_run(cpu_of(device)->threads, items_of(n, ROWS_PER_ITEM), gather_item, &e);
}

static void scatter_row(const struct expert *e, uint64_t index)
{
    uint64_t slot = (uint64_t)e->slots[index], width = e->shape.width;
    float *to = e->to + slot / e->shape.top_k * width;
    const float *from = e->from + index * width;
    for (uint64_t i = 0; i < width; i += LANES) {
        uint64_t left = width - i;
        v8 value = v8_load(from + i, left);
        if (e->weights != NULL)
            value = v8_round(_mm256_mul_ps(value, v8_set(e->weights[slot])), e->rounding);
        v8_store(to + i, left, v8_round(_mm256_add_ps(v8_load(to + i, left), value), e->rounding));
    }
}

static void scatter_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct expert *e = context;
    uint64_t end = least((item + 1) * ROWS_PER_ITEM, e->n);
    for (uint64_t i = item * ROWS_PER_ITEM; i < end; i++)
        scatter_row(e, i);
}

void cpu_expert_scatter(struct device *device, compute_t *to, const compute_t *from,
                        const float *weights, const int32_t *slots, uint64_t n,
                        struct device_router shape)
{
    struct expert e = {.to = cpu_floats(to),
                       .from = cpu_const_floats(from),
                       .weights = weights,
                       .slots = slots,
                       .n = n,
                       .shape = shape,
                       .rounding = rounding_of(device)};
    threads_run(cpu_of(device)->threads, items_of(n, ROWS_PER_ITEM), scatter_item, &e);
}

static void scatter_backward_row(const struct expert *e, uint64_t index)
{
    const struct device_expert_scatter_backward *args = e->backward;
    uint64_t slot = (uint64_t)args->slots[index], width = e->shape.width;
    const float *dto = cpu_const_floats(args->dto) + slot / e->shape.top_k * width;
    const float *from = cpu_const_floats(args->from) + index * width;
    float *dfrom = cpu_floats(args->dfrom) + index * width;
    /* rounded weights make the product, and so its derivatives, numbers of the compute dtype */
    enum rounding rounding = e->shape.round == DEVICE_ROUTER_ROUNDED ? e->rounding : ROUND_NONE;
    v8 weight = v8_set(args->weights[slot]), sum = v8_set(0.0f);
    for (uint64_t i = 0; i < width; i += LANES) {
        uint64_t left = width - i;
        v8 d = v8_load(dto + i, left);
        sum = _mm256_add_ps(sum, v8_round(_mm256_mul_ps(d, v8_load(from + i, left)), rounding));
        v8_store(dfrom + i, left, v8_round(_mm256_mul_ps(d, weight), e->rounding));
    }
    args->dweights[slot] = _mm256_cvtss_f32(v8_round(v8_set(v8_sum(sum)), rounding));
}

static void scatter_backward_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct expert *e = context;
    uint64_t end = least((item + 1) * ROWS_PER_ITEM, e->backward->n);
    for (uint64_t i = item * ROWS_PER_ITEM; i < end; i++)
        scatter_backward_row(e, i);
}

void cpu_expert_scatter_backward(struct device *device,
                                 const struct device_expert_scatter_backward *args,
                                 struct device_router shape)
{
    struct expert e = {.shape = shape, .backward = args, .rounding = rounding_of(device)};
    threads_run(cpu_of(device)->threads, items_of(args->n, ROWS_PER_ITEM), scatter_backward_item,
                &e);
}
