/*
 * Cross entropy of rows of logits, and its derivative written over them.
 *
 * The sum of exponentials is taken in f32 over runs of SUM_RUN logits and in f64 over the runs, so
 * that a vocabulary of 128 Ki costs no accuracy.
 */
#pragma GCC target("avx2,fma")
#include "gpu_worker/device_cpu/cpu.h"
#include "gpu_worker/scalar.h"
#include "gpu_worker/device_cpu/simd.h"

enum { ROWS_PER_ITEM = 2, SUM_RUN = 2048 };

struct entropy {
    double *row_loss;
    float *logits;
    const int32_t *labels;
    struct device_cross_entropy shape;
    enum device_loss loss;
};

static float largest(const float *x, uint64_t n)
{
    if (n < LANES) {
        float most = x[0];
        for (uint64_t i = 1; i < n; i++)
            most = x[i] > most ? x[i] : most;
        return most;
    }
    /* the last vector overlaps: a maximum may see an element twice */
    v8 even = v8_load(x, LANES), odd = v8_load(x + n - LANES, LANES);
    uint64_t i = LANES;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        even = _mm256_max_ps(even, v8_load(x + i, LANES));
        odd = _mm256_max_ps(odd, v8_load(x + i + LANES, LANES));
    }
    if (i + LANES <= n)
        even = _mm256_max_ps(even, v8_load(x + i, LANES));
    return v8_largest(_mm256_max_ps(even, odd));
}

/* to = exp(x - most), returned summed; lanes past the end of x do not count. to may be x, or NULL
 */
static double exponentials(float *to, const float *x, uint64_t n, float most)
{
    double sum = 0;
    for (uint64_t run = 0; run < n; run += SUM_RUN) {
        uint64_t end = run + SUM_RUN < n ? run + SUM_RUN : n;
        v8 part = v8_set(0.0f);
        uint64_t i = run;
        for (; i + LANES <= end; i += LANES) {
            v8 e = v8_exp(_mm256_sub_ps(v8_load(x + i, LANES), v8_set(most)));
            if (to != NULL)
                v8_store(to + i, LANES, e);
            part = _mm256_add_ps(part, e);
        }
        if (i < end) {
            v8 e = v8_exp(_mm256_sub_ps(v8_load(x + i, end - i), v8_set(most)));
            e = _mm256_and_ps(e, _mm256_castsi256_ps(v8_mask(end - i)));
            if (to != NULL)
                v8_store(to + i, end - i, e);
            part = _mm256_add_ps(part, e);
        }
        sum += (double)v8_sum(part);
    }
    return sum;
}

/* x = (softmax(x) - onehot(label)) scale (1 - (x / cap)^2); sum: of exp(x - most) */
static void capped_gradient(float *x, const struct entropy *e, int32_t label, float most,
                            double sum)
{
    uint64_t n = e->shape.vocabulary;
    v8 factor = v8_set((float)((double)e->shape.scale / sum)), one = v8_set(1.0f);
    v8 inverse = v8_set(1.0f / e->shape.softcap);
    float t = x[label] * (1.0f / e->shape.softcap);
    for (uint64_t i = 0; i < n; i += LANES) {
        v8 logit = v8_load(x + i, n - i), ratio = _mm256_mul_ps(logit, inverse);
        v8 p = _mm256_mul_ps(v8_exp(_mm256_sub_ps(logit, v8_set(most))), factor);
        v8 slope = _mm256_sub_ps(one, _mm256_mul_ps(ratio, ratio));
        v8_store(x + i, n - i, _mm256_mul_ps(p, slope));
    }
    x[label] -= e->shape.scale * (1.0f - t * t);
}

static void scale_row(float *x, uint64_t n, float factor)
{
    for (uint64_t i = 0; i < n; i += LANES)
        v8_store(x + i, n - i, _mm256_mul_ps(v8_load(x + i, n - i), v8_set(factor)));
}

static void zero_row(float *x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i += LANES)
        v8_store(x + i, n - i, v8_set(0.0f));
}

static void entropy_row(const struct entropy *e, uint64_t row)
{
    uint64_t n = e->shape.vocabulary;
    float *x = e->logits + row * n;
    int32_t label = e->labels[row];
    e->row_loss[row] = 0;
    if (label < 0) {
        if (e->loss == DEVICE_LOSS_AND_GRADIENT)
            zero_row(x, n);
        return;
    }
    float most = largest(x, n), target = x[label];
    int capped = e->shape.softcap != 0.0f && e->loss == DEVICE_LOSS_AND_GRADIENT;
    double sum = exponentials(capped ? NULL : x, x, n, most);
    e->row_loss[row] = scalar_log(sum) + ((double)most - (double)target);
    if (capped) {
        capped_gradient(x, e, label, most, sum);
    } else if (e->loss == DEVICE_LOSS_AND_GRADIENT) {
        scale_row(x, n, (float)((double)e->shape.scale / sum));
        x[label] -= e->shape.scale;
    }
}

static void entropy_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct entropy *e = context;
    uint64_t end = (item + 1) * ROWS_PER_ITEM;
    for (uint64_t row = item * ROWS_PER_ITEM; row < end && row < e->shape.rows; row++)
        entropy_row(e, row);
}

void cpu_cross_entropy(struct device *device, double *row_loss, float *logits,
                       const int32_t *labels, struct device_cross_entropy shape,
                       enum device_loss loss)
{
    struct entropy e = {row_loss, logits, labels, shape, loss};
    threads_run(cpu_of(device)->threads, (shape.rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM,
                entropy_item, &e);
}

/* ---- soft-capping ---- */

enum { ELEMENTS_PER_ITEM = 16384 };

struct cap {
    float *x;
    uint64_t count;
    float cap;
};

static void softcap_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct cap *c = context;
    uint64_t start = item * ELEMENTS_PER_ITEM;
    uint64_t end = start + ELEMENTS_PER_ITEM < c->count ? start + ELEMENTS_PER_ITEM : c->count;
    v8 cap = v8_set(c->cap);
    for (uint64_t i = start; i < end; i += LANES) {
        v8 t = v8_tanh(_mm256_div_ps(v8_load(c->x + i, end - i), cap));
        v8_store(c->x + i, end - i, _mm256_mul_ps(t, cap));
    }
}

void cpu_softcap(struct device *device, float *logits, float cap, uint64_t elements)
{
    struct cap c = {logits, elements, cap};
    threads_run(cpu_of(device)->threads, (elements + ELEMENTS_PER_ITEM - 1) / ELEMENTS_PER_ITEM,
                softcap_item, &c);
}
