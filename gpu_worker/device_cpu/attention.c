/*
 * Attention, forward: online softmax (Milakov and Gimelshein 2018) over key tiles, as
 * FlashAttention does it (Dao et al. 2022). A work item is one tile of queries of one head; it
 * walks the key tiles from the first visible one to the diagonal:
 *
 *     S = Q K^T                     (queries, keys), one BLAS call; capped if the model does so
 *     m' = max(m, max_k S scale);   P = exp(S scale - m'), 0 where masked
 *     l = l e^(m - m') + sum P;     O = O e^(m - m') + P V
 *
 * and ends with O / l and lse = m + ln l. O accumulates in place, in the output array.
 */
#pragma GCC target("avx2,fma")
#include <math.h>

#include "gpu_worker/device_cpu/attention.h"
#include "gpu_worker/device_cpu/simd.h"
#include "gpu_worker/scalar.h"

struct forward {
    float *out, *lse;
    const float *q, *k, *v;
    struct device_attention shape;
    uint64_t query_tiles;
    float *scratch; /* (threads, CPU_SCRATCH_FLOATS) */
    enum rounding rounding;
};

/* One tile of queries on its way over the keys. */
struct tile {
    const struct forward *f;
    const int32_t *document_start; /* of the batch row */
    uint64_t start, count;         /* queries */
    uint64_t query_stride, key_stride;
    const float *q, *k, *v; /* q: first query; k, v: first key of the batch row, own head */
    float *out;             /* first query, own head */
    float *scores;          /* (count, ATTENTION_KEYS) */
    float maximum[ATTENTION_QUERIES], sum[ATTENTION_QUERIES];
};

static float row_largest(const float *x, uint64_t n)
{
    v8 most = v8_set(-INFINITY);
    for (uint64_t i = 0; i < n; i += LANES) {
        v8 part = v8_load(x + i, n - i);
        if (n - i < LANES)
            part = _mm256_blendv_ps(v8_set(-INFINITY), part, _mm256_castsi256_ps(v8_mask(n - i)));
        most = _mm256_max_ps(most, part);
    }
    return v8_largest(most);
}

/* x = exp(x scale - most), summed */
static float row_exponentials(float *x, uint64_t n, float scale, float most)
{
    v8 sum = v8_set(0.0f);
    for (uint64_t i = 0; i < n; i += LANES) {
        uint64_t left = n - i;
        v8 e = v8_exp(v8_fma(v8_load(x + i, left), v8_set(scale), v8_set(-most)));
        if (left < LANES)
            e = _mm256_and_ps(e, _mm256_castsi256_ps(v8_mask(left)));
        v8_store(x + i, left, e);
        sum = _mm256_add_ps(sum, e);
    }
    return v8_sum(sum);
}

/* x = cap tanh(x scale / cap) */
static void row_cap(float *x, uint64_t n, float scale, float cap)
{
    v8 inner = v8_set(scale / cap), outer = v8_set(cap);
    for (uint64_t i = 0; i < n; i += LANES) {
        v8 t = v8_tanh(_mm256_mul_ps(v8_load(x + i, n - i), inner));
        v8_store(x + i, n - i, _mm256_mul_ps(t, outer));
    }
}

static void row_multiply(float *x, uint64_t n, float factor)
{
    for (uint64_t i = 0; i < n; i += LANES)
        v8_store(x + i, n - i, _mm256_mul_ps(v8_load(x + i, n - i), v8_set(factor)));
}

static void row_zero(float *x, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        x[i] = 0;
}

static float exponential(float x)
{
    return _mm256_cvtss_f32(v8_exp(v8_set(x)));
}

/* Scores of one query -> probabilities relative to the new maximum; what was summed so far is
 * rescaled. */
static void softmax_row(struct tile *tile, uint64_t i, uint64_t key_start, uint64_t keys)
{
    uint64_t query = tile->start + i;
    float *scores = tile->scores + i * ATTENTION_KEYS;
    const struct device_attention *shape = &tile->f->shape;
    uint64_t first = attention_from(query, (uint64_t)tile->document_start[query], shape->window);
    struct attention_range seen = attention_visible(query, first, key_start, key_start + keys);
    row_zero(scores, 0, seen.from);
    row_zero(scores, seen.to, keys);
    if (seen.to == 0)
        return;
    float scale = shape->scale;
    float *visible = scores + seen.from;
    if (shape->softcap != 0.0f) {
        row_cap(visible, seen.to - seen.from, scale, shape->softcap);
        scale = 1.0f;
    }
    float most = row_largest(visible, seen.to - seen.from) * scale;
    if (most > tile->maximum[i]) {
        float factor = exponential(tile->maximum[i] - most);
        tile->maximum[i] = most;
        tile->sum[i] *= factor;
        if (factor != 1.0f)
            row_multiply(tile->out + i * tile->query_stride, shape->head_dim, factor);
    }
    tile->sum[i] += row_exponentials(visible, seen.to - seen.from, scale, tile->maximum[i]);
}

static void attend_keys(struct tile *tile, uint64_t key_start, uint64_t keys, float beta)
{
    uint64_t head_dim = tile->f->shape.head_dim;
    struct gemm scores = {.transpose_b = GEMM_TRANSPOSED,
                          .m = tile->count,
                          .n = keys,
                          .k = head_dim,
                          .a = tile->q,
                          .lda = tile->query_stride,
                          .b = tile->k + key_start * tile->key_stride,
                          .ldb = tile->key_stride,
                          .c = tile->scores,
                          .ldc = ATTENTION_KEYS};
    gemm_tile(&scores);
    for (uint64_t i = 0; i < tile->count; i++)
        softmax_row(tile, i, key_start, keys);
    struct gemm values = {.m = tile->count,
                          .n = head_dim,
                          .k = keys,
                          .a = tile->scores,
                          .lda = ATTENTION_KEYS,
                          .b = tile->v + key_start * tile->key_stride,
                          .ldb = tile->key_stride,
                          .c = tile->out,
                          .ldc = tile->query_stride,
                          .beta = beta};
    gemm_tile(&values);
}

static void finish_tile(const struct tile *tile, float *lse)
{
    uint64_t head_dim = tile->f->shape.head_dim;
    for (uint64_t i = 0; i < tile->count; i++) {
        float *out = tile->out + i * tile->query_stride;
        v8 factor = v8_set(1.0f / tile->sum[i]);
        for (uint64_t d = 0; d < head_dim; d += LANES)
            v8_store(
                out + d, head_dim - d,
                v8_round(_mm256_mul_ps(v8_load(out + d, head_dim - d), factor), tile->f->rounding));
        lse[i] = (float)((double)tile->maximum[i] + scalar_log((double)tile->sum[i]));
    }
}

static void forward_item(void *context, uint64_t item, uint32_t thread)
{
    const struct forward *f = context;
    const struct device_attention *shape = &f->shape;
    /* long tiles (late queries) first, so that no thread starts one last */
    uint64_t tile_index = f->query_tiles - 1 - item / (shape->batch * shape->query_heads);
    uint64_t head = item % shape->query_heads;
    uint64_t row = item / shape->query_heads % shape->batch;
    uint64_t key_head = head / (shape->query_heads / shape->key_heads);
    struct tile tile = {.f = f, .start = tile_index * ATTENTION_QUERIES};
    tile.count = attention_least(ATTENTION_QUERIES, shape->seq_len - tile.start);
    tile.document_start = shape->document_start + row * shape->seq_len;
    tile.query_stride = shape->query_heads * shape->head_dim;
    tile.key_stride = shape->key_heads * shape->head_dim;
    uint64_t first =
        (row * shape->seq_len + tile.start) * tile.query_stride + head * shape->head_dim;
    uint64_t first_key = row * shape->seq_len * tile.key_stride + key_head * shape->head_dim;
    tile.q = f->q + first;
    tile.out = f->out + first;
    tile.k = f->k + first_key;
    tile.v = f->v + first_key;
    tile.scores = f->scratch + (uint64_t)thread * CPU_SCRATCH_FLOATS;
    for (uint64_t i = 0; i < tile.count; i++) {
        tile.maximum[i] = -INFINITY;
        tile.sum[i] = 0;
        row_zero(tile.out + i * tile.query_stride, 0, shape->head_dim);
    }
    uint64_t end = tile.start + tile.count;
    uint64_t key = attention_first_key(tile.document_start, tile.start, end, shape->window);
    for (; key < end; key += ATTENTION_KEYS)
        attend_keys(&tile, key, attention_least(ATTENTION_KEYS, end - key), 1.0f);
    finish_tile(&tile, f->lse + (row * shape->query_heads + head) * shape->seq_len + tile.start);
}

void cpu_attention_forward(struct device *device, compute_t *out, float *lse, const compute_t *q,
                           const compute_t *k, const compute_t *v, struct device_attention shape)
{
    struct cpu_device *cpu = cpu_of(device);
    struct forward f = {.out = cpu_floats(out),
                        .lse = lse,
                        .q = cpu_const_floats(q),
                        .k = cpu_const_floats(k),
                        .v = cpu_const_floats(v),
                        .shape = shape,
                        .query_tiles = (shape.seq_len + ATTENTION_QUERIES - 1) / ATTENTION_QUERIES,
                        .scratch = cpu->scratch,
                        .rounding = rounding_of(device)};
    threads_run(cpu->threads, f.query_tiles * shape.batch * shape.query_heads, forward_item, &f);
}
