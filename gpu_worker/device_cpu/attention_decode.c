/* Attention of single queries over a key/value cache: dot products, one (row, head) at a time. */
#pragma GCC target("avx2,fma")
#include <math.h>
#include <string.h>

#include "gpu_worker/device_cpu/attention.h"
#include "gpu_worker/device_cpu/simd.h"

struct decode {
    const struct device_decode_arrays *arrays;
    struct device_decode shape;
    enum rounding rounding;
};

static uint64_t cache_index(const struct device_decode *shape, uint64_t row, uint64_t position)
{
    return ((uint64_t)shape->sequence[row] * shape->context + position) * shape->key_heads *
           shape->head_dim;
}

static void remember(const struct decode *d, uint64_t row)
{
    const struct device_decode *shape = &d->shape;
    uint64_t floats = shape->key_heads * shape->head_dim;
    uint64_t at = cache_index(shape, row, (uint64_t)shape->position[row]);
    memcpy(cpu_floats(d->arrays->cache_k) + at, cpu_const_floats(d->arrays->k) + row * floats,
           floats * sizeof(float));
    memcpy(cpu_floats(d->arrays->cache_v) + at, cpu_const_floats(d->arrays->v) + row * floats,
           floats * sizeof(float));
}

static float dot(const float *a, const float *b, uint64_t n)
{
    v8 sum = v8_set(0.0f);
    for (uint64_t i = 0; i < n; i += LANES)
        sum = v8_fma(v8_load(a + i, n - i), v8_load(b + i, n - i), sum);
    return v8_sum(sum);
}

/* out = a out + b v */
static void blend(float *out, float a, float b, const float *v, uint64_t n)
{
    for (uint64_t i = 0; i < n; i += LANES) {
        v8 kept = _mm256_mul_ps(v8_load(out + i, n - i), v8_set(a));
        v8_store(out + i, n - i, v8_fma(v8_load(v + i, n - i), v8_set(b), kept));
    }
}

static float capped(float score, float cap)
{
    return cap * _mm256_cvtss_f32(v8_tanh(v8_set(score / cap)));
}

static void decode_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct decode *d = context;
    const struct device_decode *shape = &d->shape;
    uint64_t head = item % shape->query_heads, row = item / shape->query_heads;
    uint64_t key_head = head / (shape->query_heads / shape->key_heads), n = shape->head_dim;
    uint64_t cache = cache_index(shape, row, 0) + key_head * n;
    const float *q = cpu_const_floats(d->arrays->q) + item * n;
    const float *k = cpu_floats(d->arrays->cache_k) + cache;
    const float *v = cpu_floats(d->arrays->cache_v) + cache;
    float *out = cpu_floats(d->arrays->out) + item * n;
    memset(out, 0, n * sizeof(float));
    float most = -INFINITY, sum = 0;
    uint64_t last = (uint64_t)shape->position[row];
    for (uint64_t key = attention_from(last, 0, shape->window); key <= last; key++) {
        float score = dot(q, k + key * shape->key_heads * n, n) * shape->scale;
        if (shape->softcap != 0.0f)
            score = capped(score, shape->softcap);
        float next = score > most ? score : most;
        float keep = _mm256_cvtss_f32(v8_exp(v8_set(most - next)));
        float p = _mm256_cvtss_f32(v8_exp(v8_set(score - next)));
        most = next;
        sum = sum * keep + p;
        blend(out, keep, p, v + key * shape->key_heads * n, n);
    }
    for (uint64_t i = 0; i < n; i += LANES)
        v8_store(out + i, n - i,
                 v8_round(_mm256_div_ps(v8_load(out + i, n - i), v8_set(sum)), d->rounding));
}

void cpu_attention_decode(struct device *device, const struct device_decode_arrays *arrays,
                          struct device_decode shape)
{
    struct decode d = {arrays, shape, rounding_of(device)};
    for (uint64_t row = 0; row < shape.rows; row++)
        remember(&d, row);
    threads_run(cpu_of(device)->threads, shape.rows * shape.query_heads, decode_item, &d);
}
