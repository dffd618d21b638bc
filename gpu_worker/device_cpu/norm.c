/*
 * RMSNorm. With s = 1/sqrt(mean(x^2) + eps) and n = round(x s), y = round(w n). Backward, as
 * automatic differentiation of that: g = round(dy w); dx = s (g - x s^2 sum(g x) / C), dw = sum of
 * dy n over rows: DEVICE_NORM_ROWS rows at a time, then those partial sums one after the other.
 */
#pragma GCC target("avx2,fma")
#include <math.h>

#include "gpu_worker/device_cpu/cpu.h"
#include "gpu_worker/device_cpu/simd.h"

enum { COLUMNS_PER_ITEM = 64 };

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

struct forward {
    float *y, *rstd;
    const float *x, *w;
    uint64_t rows, width;
    float epsilon;
    enum rounding rounding;
};

static float sum_of_squares(const float *x, uint64_t width)
{
    v8 even = v8_set(0.0f), odd = v8_set(0.0f);
    for (uint64_t i = 0; i < width; i += 2 * LANES) {
        v8 a = v8_load(x + i, width - i);
        even = v8_fma(a, a, even);
        if (i + LANES < width) {
            v8 b = v8_load(x + i + LANES, width - i - LANES);
            odd = v8_fma(b, b, odd);
        }
    }
    return v8_sum(_mm256_add_ps(even, odd));
}

static void forward_rows(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct forward *f = context;
    uint64_t end = least((item + 1) * DEVICE_NORM_ROWS, f->rows);
    for (uint64_t row = item * DEVICE_NORM_ROWS; row < end; row++) {
        const float *x = f->x + row * f->width;
        float *y = f->y + row * f->width;
        float mean = sum_of_squares(x, f->width) / (float)f->width;
        float rstd = 1.0f / sqrtf(mean + f->epsilon);
        f->rstd[row] = rstd;
        for (uint64_t i = 0; i < f->width; i += LANES) {
            uint64_t left = f->width - i;
            v8 n = v8_round(_mm256_mul_ps(v8_load(x + i, left), v8_set(rstd)), f->rounding);
            v8_store(y + i, left, v8_round(_mm256_mul_ps(v8_load(f->w + i, left), n), f->rounding));
        }
    }
}

static enum rounding rounding_of(const struct device *device)
{
    return device->dtype == DEVICE_BF16 ? ROUND_BF16 : ROUND_NONE;
}

static uint64_t row_items(uint64_t rows)
{
    return (rows + DEVICE_NORM_ROWS - 1) / DEVICE_NORM_ROWS;
}

void cpu_rmsnorm_forward(struct device *device, compute_t *y, float *rstd, const compute_t *x,
                         const compute_t *w, uint64_t rows, uint64_t width, float epsilon)
{
    struct forward forward = {
        cpu_floats(y), rstd,    cpu_const_floats(x), cpu_const_floats(w), rows,
        width,         epsilon, rounding_of(device)};
    threads_run(cpu_of(device)->threads, row_items(rows), forward_rows, &forward);
}

struct backward {
    const struct device_rmsnorm_backward *args;
    enum rounding rounding;
};

/* sum(g x) of a row; adds dy n into `partial` on the way */
static float backward_sums(const struct backward *b, uint64_t row, float *partial)
{
    const struct device_rmsnorm_backward *args = b->args;
    const float *x = cpu_const_floats(args->x) + row * args->width;
    const float *dy = cpu_const_floats(args->dy) + row * args->width;
    const float *w = cpu_const_floats(args->w);
    v8 rstd = v8_set(args->rstd[row]);
    v8 sum = v8_set(0.0f);
    for (uint64_t i = 0; i < args->width; i += LANES) {
        uint64_t left = args->width - i;
        v8 xi = v8_load(x + i, left), dyi = v8_load(dy + i, left);
        v8 n = v8_round(_mm256_mul_ps(xi, rstd), b->rounding);
        v8 g = v8_round(_mm256_mul_ps(dyi, v8_load(w + i, left)), b->rounding);
        sum = v8_fma(g, xi, sum);
        v8_store(partial + i, left, v8_fma(dyi, n, v8_load(partial + i, left)));
    }
    return v8_sum(sum);
}

static void backward_row(const struct backward *b, uint64_t row, float sum)
{
    const struct device_rmsnorm_backward *args = b->args;
    uint64_t start = row * args->width;
    const float *x = cpu_const_floats(args->x) + start, *dy = cpu_const_floats(args->dy) + start;
    const float *residual =
        args->residual == NULL ? NULL : cpu_const_floats(args->residual) + start;
    const float *w = cpu_const_floats(args->w);
    float *dx = cpu_floats(args->dx) + start;
    float *again = args->y_again == NULL ? NULL : cpu_floats(args->y_again) + start;
    float s = args->rstd[row];
    v8 rstd = v8_set(s), pull = v8_set(-(s * s * (sum / (float)args->width)));
    for (uint64_t i = 0; i < args->width; i += LANES) {
        uint64_t left = args->width - i;
        v8 xi = v8_load(x + i, left), wi = v8_load(w + i, left);
        v8 g = v8_round(_mm256_mul_ps(v8_load(dy + i, left), wi), b->rounding);
        v8 d = v8_round(_mm256_mul_ps(rstd, v8_fma(xi, pull, g)), b->rounding);
        if (residual != NULL)
            d = v8_round(_mm256_add_ps(v8_load(residual + i, left), d), b->rounding);
        v8_store(dx + i, left, d);
        if (again != NULL) {
            v8 n = v8_round(_mm256_mul_ps(xi, rstd), b->rounding);
            v8_store(again + i, left, v8_round(_mm256_mul_ps(wi, n), b->rounding));
        }
    }
}

static void backward_rows(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct backward *b = context;
    float *partial = b->args->scratch + item * b->args->width;
    for (uint64_t i = 0; i < b->args->width; i++)
        partial[i] = 0.0f;
    uint64_t end = least((item + 1) * DEVICE_NORM_ROWS, b->args->rows);
    for (uint64_t row = item * DEVICE_NORM_ROWS; row < end; row++)
        backward_row(b, row, backward_sums(b, row, partial));
}

static void sum_partials(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct device_rmsnorm_backward *args = ((const struct backward *)context)->args;
    uint64_t end = least((item + 1) * COLUMNS_PER_ITEM, args->width);
    for (uint64_t i = item * COLUMNS_PER_ITEM; i < end; i += LANES) {
        uint64_t left = end - i;
        v8 sum = v8_set(0.0f);
        for (uint64_t p = 0; p < row_items(args->rows); p++)
            sum = _mm256_add_ps(sum, v8_load(args->scratch + p * args->width + i, left));
        v8_store(args->dw + i, left, _mm256_add_ps(v8_load(args->dw + i, left), sum));
    }
}

void cpu_rmsnorm_backward(struct device *device, const struct device_rmsnorm_backward *args)
{
    struct backward backward = {args, rounding_of(device)};
    struct threads *threads = cpu_of(device)->threads;
    threads_run(threads, row_items(args->rows), backward_rows, &backward);
    threads_run(threads, (args->width + COLUMNS_PER_ITEM - 1) / COLUMNS_PER_ITEM, sum_partials,
                &backward);
}
