/*
 * Attention, backward (FlashAttention's, Dao et al. 2022). With P = exp(S scale - lse) and
 * D_q = sum_d dO O:
 *
 *     dV += P^T dO      dP = dO V^T      dS = P (dP - D) scale      dQ += dS K      dK += dS^T Q
 *
 * With a softcap c, t = tanh(S scale / c): P = exp(c t - lse), and dS has the factor 1 - t^2.
 *
 * A work item is one query head of one batch row: it walks key tiles, and for each the query tiles
 * that see it, so that every sum has one fixed order. Query heads that share a key head write
 * separate dK and dV, which are then added in the order of the heads.
 */
#pragma GCC target("avx2,fma")
#include "gpu_worker/device_cpu/attention.h"
#include "gpu_worker/device_cpu/simd.h"

enum { ROWS_PER_ITEM = 32 };

struct backward {
    float *dq, *dk, *dv;
    const float *dout, *out, *lse, *q, *k, *v;
    float *dots;              /* (B,Hq,T): D */
    float *head_dk, *head_dv; /* (B,T,Hq,D); dk and dv themselves where Hq = Hk */
    struct device_attention shape;
    float *scratch;
    enum rounding rounding;
};

/* One query head of one batch row. All pointers are at its first element. */
struct head {
    const struct backward *b;
    const int32_t *document_start;
    uint64_t stride, key_stride, head_dim, seq_len;
    const float *q, *k, *v, *dout, *out, *lse;
    float *dq, *dk, *dv, *dots; /* dk, dv have the stride of queries */
    float *p, *ds;              /* (ATTENTION_QUERIES, ATTENTION_BACKWARD_KEYS) */
};

static void compute_dots(const struct head *h)
{
    for (uint64_t t = 0; t < h->seq_len; t++) {
        const float *dout = h->dout + t * h->stride, *out = h->out + t * h->stride;
        v8 sum = v8_set(0.0f);
        for (uint64_t d = 0; d < h->head_dim; d += LANES)
            sum =
                v8_fma(v8_load(dout + d, h->head_dim - d), v8_load(out + d, h->head_dim - d), sum);
        h->dots[t] = v8_sum(sum);
    }
}

/* Where query tile and key tile meet. */
struct meeting {
    uint64_t query, queries, key, keys;
};

/* p: scores -> probabilities; ds: dP -> dS; both zero where masked */
static void softmax_backward_row(const struct head *h, const struct meeting *at, uint64_t i)
{
    uint64_t query = at->query + i;
    float *p = h->p + i * ATTENTION_BACKWARD_KEYS, *ds = h->ds + i * ATTENTION_BACKWARD_KEYS;
    const struct device_attention *shape = &h->b->shape;
    uint64_t first = attention_from(query, (uint64_t)h->document_start[query], shape->window);
    struct attention_range seen = attention_visible(query, first, at->key, at->key + at->keys);
    for (uint64_t j = 0; j < seen.from; j++)
        p[j] = ds[j] = 0;
    for (uint64_t j = seen.to; j < at->keys; j++)
        p[j] = ds[j] = 0;
    v8 scale = v8_set(shape->scale), lse = v8_set(-h->lse[query]);
    v8 dot = v8_set(h->dots[query]);
    for (uint64_t j = seen.from; j < seen.to; j += LANES) {
        uint64_t left = seen.to - j;
        v8 score = v8_load(p + j, left);
        v8 d = _mm256_mul_ps(_mm256_sub_ps(v8_load(ds + j, left), dot), scale);
        v8 probability;
        if (shape->softcap == 0.0f) {
            probability = v8_exp(v8_fma(score, scale, lse));
        } else {
            v8 t = v8_tanh(_mm256_mul_ps(score, v8_set(shape->scale / shape->softcap)));
            probability = v8_exp(v8_fma(t, v8_set(shape->softcap), lse));
            d = _mm256_mul_ps(d, _mm256_sub_ps(v8_set(1.0f), _mm256_mul_ps(t, t)));
        }
        v8_store(p + j, left, probability);
        v8_store(ds + j, left, _mm256_mul_ps(probability, d));
    }
}

/* c (queries, keys) = a (queries, D) b (keys, D)^T */
static void scores_product(const struct head *h, const struct meeting *at, const float *a,
                           const float *b, float *c)
{
    struct gemm product = {.transpose_b = GEMM_TRANSPOSED,
                           .m = at->queries,
                           .n = at->keys,
                           .k = h->head_dim,
                           .a = a + at->query * h->stride,
                           .lda = h->stride,
                           .b = b + at->key * h->key_stride,
                           .ldb = h->key_stride,
                           .c = c,
                           .ldc = ATTENTION_BACKWARD_KEYS};
    gemm_tile(&product);
}

/* c (keys, D) += a (queries, keys)^T b (queries, D) */
static void keys_product(const struct head *h, const struct meeting *at, const float *a,
                         const float *b, float *c)
{
    struct gemm product = {.transpose_a = GEMM_TRANSPOSED,
                           .m = at->keys,
                           .n = h->head_dim,
                           .k = at->queries,
                           .a = a,
                           .lda = ATTENTION_BACKWARD_KEYS,
                           .b = b + at->query * h->stride,
                           .ldb = h->stride,
                           .c = c + at->key * h->stride,
                           .ldc = h->stride,
                           .beta = 1.0f};
    gemm_tile(&product);
}

static void meet(const struct head *h, const struct meeting *at)
{
    scores_product(h, at, h->q, h->k, h->p);
    scores_product(h, at, h->dout, h->v, h->ds);
    for (uint64_t i = 0; i < at->queries; i++)
        softmax_backward_row(h, at, i);
    keys_product(h, at, h->p, h->dout, h->dv);
    keys_product(h, at, h->ds, h->q, h->dk);
    struct gemm queries = {.m = at->queries,
                           .n = h->head_dim,
                           .k = at->keys,
                           .a = h->ds,
                           .lda = ATTENTION_BACKWARD_KEYS,
                           .b = h->k + at->key * h->key_stride,
                           .ldb = h->key_stride,
                           .c = h->dq + at->query * h->stride,
                           .ldc = h->stride,
                           .beta = 1.0f};
    gemm_tile(&queries);
}

static void zero_rows(float *x, uint64_t rows, uint64_t stride, uint64_t width)
{
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t i = 0; i < width; i += LANES)
            v8_store(x + row * stride + i, width - i, v8_set(0.0f));
}

static void round_rows(float *x, uint64_t rows, uint64_t stride, uint64_t width)
{
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t i = 0; i < width; i += LANES) {
            float *at = x + row * stride + i;
            v8_store(at, width - i, v8_bf16(v8_load(at, width - i)));
        }
}

static void walk_head(const struct head *h)
{
    uint64_t window = h->b->shape.window;
    for (uint64_t key = 0; key < h->seq_len; key += ATTENTION_BACKWARD_KEYS) {
        uint64_t key_end = attention_least(key + ATTENTION_BACKWARD_KEYS, h->seq_len);
        /* queries before `key` see none of these keys */
        uint64_t query = key / ATTENTION_QUERIES * ATTENTION_QUERIES;
        for (; query < h->seq_len; query += ATTENTION_QUERIES) {
            uint64_t query_end = attention_least(query + ATTENTION_QUERIES, h->seq_len);
            if (window != 0 && query >= key_end - 1 + window)
                break; /* and no later one: the last key has left the window */
            if (attention_first_key(h->document_start, query, query_end, window) >= key_end)
                continue;
            struct meeting at = {query, query_end - query, key, key_end - key};
            meet(h, &at);
        }
    }
}

static void backward_item(void *context, uint64_t item, uint32_t thread)
{
    const struct backward *b = context;
    const struct device_attention *shape = &b->shape;
    uint64_t index = item % shape->query_heads, row = item / shape->query_heads;
    uint64_t key_index = index / (shape->query_heads / shape->key_heads);
    uint64_t stride = shape->query_heads * shape->head_dim;
    uint64_t key_stride = shape->key_heads * shape->head_dim;
    uint64_t first = row * shape->seq_len * stride + index * shape->head_dim;
    uint64_t first_key = row * shape->seq_len * key_stride + key_index * shape->head_dim;
    uint64_t first_row = item * shape->seq_len;
    float *scratch = b->scratch + (uint64_t)thread * CPU_SCRATCH_FLOATS;
    struct head h = {.b = b,
                     .document_start = shape->document_start + row * shape->seq_len,
                     .stride = stride,
                     .key_stride = key_stride,
                     .head_dim = shape->head_dim,
                     .seq_len = shape->seq_len,
                     .q = b->q + first,
                     .k = b->k + first_key,
                     .v = b->v + first_key,
                     .dout = b->dout + first,
                     .out = b->out + first,
                     .lse = b->lse + first_row,
                     .dq = b->dq + first,
                     .dk = b->head_dk + first,
                     .dv = b->head_dv + first,
                     .dots = b->dots + first_row,
                     .p = scratch,
                     .ds = scratch + ATTENTION_QUERIES * ATTENTION_BACKWARD_KEYS + 16};
    zero_rows(h.dq, h.seq_len, stride, h.head_dim);
    zero_rows(h.dk, h.seq_len, stride, h.head_dim);
    zero_rows(h.dv, h.seq_len, stride, h.head_dim);
    compute_dots(&h);
    walk_head(&h);
    if (b->rounding == ROUND_NONE)
        return;
    round_rows(h.dq, h.seq_len, stride, h.head_dim);
    round_rows(h.dk, h.seq_len, stride, h.head_dim);
    round_rows(h.dv, h.seq_len, stride, h.head_dim);
}

static void sum_heads(const struct backward *b, float *to, const float *from, uint64_t row)
{
    const struct device_attention *shape = &b->shape;
    uint64_t share = shape->query_heads / shape->key_heads, dim = shape->head_dim;
    for (uint64_t head = 0; head < shape->key_heads; head++) {
        const float *group = from + (row * shape->query_heads + head * share) * dim;
        float *sum_to = to + (row * shape->key_heads + head) * dim;
        for (uint64_t d = 0; d < dim; d += LANES) {
            v8 sum = v8_load(group + d, dim - d);
            for (uint64_t i = 1; i < share; i++)
                sum = _mm256_add_ps(sum, v8_load(group + i * dim + d, dim - d));
            v8_store(sum_to + d, dim - d, v8_round(sum, b->rounding));
        }
    }
}

static void sum_heads_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct backward *b = context;
    uint64_t rows = b->shape.batch * b->shape.seq_len;
    uint64_t end = attention_least((item + 1) * ROWS_PER_ITEM, rows);
    for (uint64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        sum_heads(b, b->dk, b->head_dk, row);
        sum_heads(b, b->dv, b->head_dv, row);
    }
}

/* scratch: dots, then with grouped heads dK and dV of every query head */
static uint64_t dots_floats(struct device_attention shape)
{
    return (shape.batch * shape.query_heads * shape.seq_len + 15) / 16 * 16;
}

static uint64_t head_floats(struct device_attention shape)
{
    if (shape.query_heads == shape.key_heads)
        return 0;
    return shape.batch * shape.seq_len * shape.query_heads * shape.head_dim + 16;
}

uint64_t cpu_attention_scratch_bytes(const struct device *device, struct device_attention shape)
{
    (void)device;
    return (dots_floats(shape) + 2 * head_floats(shape)) * sizeof(float);
}

void cpu_attention_backward(struct device *device, const struct device_attention_backward *args,
                            struct device_attention shape)
{
    struct cpu_device *cpu = cpu_of(device);
    struct backward b = {.dq = cpu_floats(args->dq),
                         .dk = cpu_floats(args->dk),
                         .dv = cpu_floats(args->dv),
                         .dout = cpu_const_floats(args->dout),
                         .out = cpu_const_floats(args->out),
                         .lse = args->lse,
                         .q = cpu_const_floats(args->q),
                         .k = cpu_const_floats(args->k),
                         .v = cpu_const_floats(args->v),
                         .dots = args->scratch,
                         .shape = shape,
                         .scratch = cpu->scratch,
                         .rounding = rounding_of(device)};
    b.head_dk = b.dk;
    b.head_dv = b.dv;
    if (shape.query_heads != shape.key_heads) {
        b.head_dk = b.dots + dots_floats(shape);
        b.head_dv = b.head_dk + head_floats(shape);
    }
    threads_run(cpu->threads, shape.batch * shape.query_heads, backward_item, &b);
    if (shape.query_heads != shape.key_heads)
        threads_run(cpu->threads, (shape.batch * shape.seq_len + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM,
                    sum_heads_item, &b);
}
