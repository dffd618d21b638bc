/*
 * RMSNorm, Gemma's RMSNorm and LayerNorm, as one: with m = mean(x) or 0, s = 1/sqrt(mean((x - m)^2)
 * + eps), n = (x - m) s and the gain a = w or 1 + w,
 *
 *     y = round(a n + b),   n rounded first in RMSNORM
 *
 * and backward, as automatic differentiation of that: g = dy a (rounded in RMSNORM);
 * dx = s (g - mean(g) - (x - m) s^2 mean(g (x - m))), without mean(g) where there is no m;
 * dw = sum of dy n, db = sum of dy over rows: DEVICE_NORM_ROWS rows at a time, then those partial
 * sums one after the other. What a norm does not have is -0.0, which changes no bit of a sum.
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

/* What the three norms differ in. */
struct norm {
    enum device_norm kind;
    uint64_t width;
    const float *w, *bias;
    float plus;                     /* the gain is w + plus */
    enum rounding rounding, inside; /* of what is stored; of n and g */
};

static struct norm norm_of(const struct device *device, enum device_norm kind, uint64_t width,
                           const compute_t *w, const compute_t *bias)
{
    enum rounding rounding = rounding_of(device);
    return (struct norm){.kind = kind,
                         .width = width,
                         .w = cpu_const_floats(w),
                         .bias = bias == NULL ? NULL : cpu_const_floats(bias),
                         .plus = kind == DEVICE_RMSNORM_PLUS ? 1.0f : -0.0f,
                         .rounding = rounding,
                         .inside = kind == DEVICE_RMSNORM ? rounding : ROUND_NONE};
}

static inline v8 gain(const struct norm *norm, uint64_t i, uint64_t left)
{
    return _mm256_add_ps(v8_load(norm->w + i, left), v8_set(norm->plus));
}

/* y of the centered x */
static inline v8 normed(const struct norm *norm, v8 centered, v8 rstd, uint64_t i, uint64_t left)
{
    v8 n = v8_round(_mm256_mul_ps(centered, rstd), norm->inside);
    v8 bias = norm->bias == NULL ? v8_set(-0.0f) : v8_load(norm->bias + i, left);
    return v8_round(v8_fma(gain(norm, i, left), n, bias), norm->rounding);
}

/* x - mean, and 0 past the end */
static inline v8 centered(const float *x, uint64_t left, v8 mean)
{
    v8 c = _mm256_sub_ps(v8_load(x, left), mean);
    return left < LANES ? _mm256_and_ps(c, _mm256_castsi256_ps(v8_mask(left))) : c;
}

static float row_mean(const struct norm *norm, const float *x)
{
    if (norm->kind != DEVICE_LAYERNORM)
        return 0.0f;
    v8 even = v8_set(0.0f), odd = v8_set(0.0f);
    for (uint64_t i = 0; i < norm->width; i += 2 * LANES) {
        even = _mm256_add_ps(even, v8_load(x + i, norm->width - i));
        if (i + LANES < norm->width)
            odd = _mm256_add_ps(odd, v8_load(x + i + LANES, norm->width - i - LANES));
    }
    return v8_sum(_mm256_add_ps(even, odd)) / (float)norm->width;
}

static float sum_of_squares(const float *x, uint64_t width, float mean)
{
    v8 even = v8_set(0.0f), odd = v8_set(0.0f), m = v8_set(mean);
    for (uint64_t i = 0; i < width; i += 2 * LANES) {
        v8 a = centered(x + i, width - i, m);
        even = v8_fma(a, a, even);
        if (i + LANES < width) {
            v8 b = centered(x + i + LANES, width - i - LANES, m);
            odd = v8_fma(b, b, odd);
        }
    }
    return v8_sum(_mm256_add_ps(even, odd));
}

struct forward {
    struct norm norm;
    const struct device_norm_forward *args;
};

static void forward_row(const struct forward *f, uint64_t row)
{
    const struct norm *norm = &f->norm;
    uint64_t start = row * norm->width;
    const float *x = cpu_const_floats(f->args->x) + start;
    const float *residual =
        f->args->residual == NULL ? NULL : cpu_const_floats(f->args->residual) + start;
    float *y = cpu_floats(f->args->y) + start;
    float mean = row_mean(norm, x);
    float variance = sum_of_squares(x, norm->width, mean) / (float)norm->width;
    float rstd = 1.0f / sqrtf(variance + f->args->epsilon);
    f->args->rstd[row] = rstd;
    for (uint64_t i = 0; i < norm->width; i += LANES) {
        uint64_t left = norm->width - i;
        v8 n = normed(norm, centered(x + i, left, v8_set(mean)), v8_set(rstd), i, left);
        if (residual != NULL)
            n = v8_round(_mm256_add_ps(v8_load(residual + i, left), n), norm->rounding);
        v8_store(y + i, left, n);
    }
}

static void forward_rows(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct forward *f = context;
    uint64_t end = least((item + 1) * DEVICE_NORM_ROWS, f->args->rows);
    for (uint64_t row = item * DEVICE_NORM_ROWS; row < end; row++)
        forward_row(f, row);
}

static uint64_t row_items(uint64_t rows)
{
    return (rows + DEVICE_NORM_ROWS - 1) / DEVICE_NORM_ROWS;
}

void cpu_norm_forward(struct device *device, const struct device_norm_forward *args)
{
    struct forward forward = {norm_of(device, args->norm, args->width, args->w, args->bias), args};
    threads_run(cpu_of(device)->threads, row_items(args->rows), forward_rows, &forward);
}

struct backward {
    struct norm norm;
    const struct device_norm_backward *args;
};

/* One row, and what its derivative needs of the whole row. */
struct row {
    const float *x, *dy;
    uint64_t start;
    v8 mean, rstd;
    float sum_g, sum_gx; /* of g, of g (x - m) */
};

static inline v8 gradient_of_n(const struct norm *norm, v8 dy, uint64_t i, uint64_t left)
{
    return v8_round(_mm256_mul_ps(dy, gain(norm, i, left)), norm->inside);
}

/* The sums of a row; adds dy n into dw_part and, if there is one, dy into dbias_part on the way. */
static void backward_sums(const struct backward *b, struct row *row, float *dw_part,
                          float *dbias_part)
{
    const struct norm *norm = &b->norm;
    v8 sum_g = v8_set(0.0f), sum_gx = v8_set(0.0f);
    for (uint64_t i = 0; i < norm->width; i += LANES) {
        uint64_t left = norm->width - i;
        v8 c = _mm256_sub_ps(v8_load(row->x + i, left), row->mean), dy = v8_load(row->dy + i, left);
        v8 n = v8_round(_mm256_mul_ps(c, row->rstd), norm->inside);
        v8 g = gradient_of_n(norm, dy, i, left);
        sum_g = _mm256_add_ps(sum_g, g);
        sum_gx = v8_fma(g, c, sum_gx);
        v8_store(dw_part + i, left, v8_fma(dy, n, v8_load(dw_part + i, left)));
        if (b->args->dbias != NULL)
            v8_store(dbias_part + i, left, _mm256_add_ps(dy, v8_load(dbias_part + i, left)));
    }
    row->sum_g = norm->kind == DEVICE_LAYERNORM ? v8_sum(sum_g) : 0.0f;
    row->sum_gx = v8_sum(sum_gx);
}

static void backward_row(const struct backward *b, const struct row *row, float rstd)
{
    const struct norm *norm = &b->norm;
    const struct device_norm_backward *args = b->args;
    const float *residual =
        args->residual == NULL ? NULL : cpu_const_floats(args->residual) + row->start;
    float *dx = cpu_floats(args->dx) + row->start;
    float *again = args->y_again == NULL ? NULL : cpu_floats(args->y_again) + row->start;
    v8 pull = v8_set(-(rstd * rstd * (row->sum_gx / (float)norm->width)));
    v8 mean_g = v8_set(row->sum_g / (float)norm->width);
    for (uint64_t i = 0; i < norm->width; i += LANES) {
        uint64_t left = norm->width - i;
        v8 c = _mm256_sub_ps(v8_load(row->x + i, left), row->mean);
        v8 g = gradient_of_n(norm, v8_load(row->dy + i, left), i, left);
        v8 d = v8_fma(c, pull, _mm256_sub_ps(g, mean_g));
        d = v8_round(_mm256_mul_ps(row->rstd, d), norm->rounding);
        if (residual != NULL)
            d = v8_round(_mm256_add_ps(v8_load(residual + i, left), d), norm->rounding);
        v8_store(dx + i, left, d);
        if (again != NULL)
            v8_store(again + i, left, normed(norm, c, row->rstd, i, left));
    }
}

static void backward_rows(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct backward *b = context;
    const struct device_norm_backward *args = b->args;
    uint64_t width = args->width;
    float *dw_part = args->scratch + item * width;
    float *dbias_part =
        args->dbias == NULL ? NULL : args->scratch + (row_items(args->rows) + item) * width;
    for (uint64_t i = 0; i < width; i++)
        dw_part[i] = 0.0f;
    for (uint64_t i = 0; args->dbias != NULL && i < width; i++)
        dbias_part[i] = 0.0f;
    uint64_t end = least((item + 1) * DEVICE_NORM_ROWS, args->rows);
    for (uint64_t r = item * DEVICE_NORM_ROWS; r < end; r++) {
        struct row row = {.x = cpu_const_floats(args->x) + r * width,
                          .dy = cpu_const_floats(args->dy) + r * width,
                          .start = r * width,
                          .rstd = v8_set(args->rstd[r])};
        row.mean = v8_set(row_mean(&b->norm, row.x));
        backward_sums(b, &row, dw_part, dbias_part);
        backward_row(b, &row, args->rstd[r]);
    }
}

/* to += the partial sums of the columns of an item */
static void sum_partials(float *to, const float *parts, uint64_t n_parts, uint64_t width,
                         uint64_t item)
{
    uint64_t end = least((item + 1) * COLUMNS_PER_ITEM, width);
    for (uint64_t i = item * COLUMNS_PER_ITEM; i < end; i += LANES) {
        uint64_t left = end - i;
        v8 sum = v8_set(0.0f);
        for (uint64_t p = 0; p < n_parts; p++)
            sum = _mm256_add_ps(sum, v8_load(parts + p * width + i, left));
        v8_store(to + i, left, _mm256_add_ps(v8_load(to + i, left), sum));
    }
}

static void sum_partials_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct device_norm_backward *args = ((const struct backward *)context)->args;
    uint64_t parts = row_items(args->rows), width = args->width;
    sum_partials(args->dw, args->scratch, parts, width, item);
    if (args->dbias != NULL)
        sum_partials(args->dbias, args->scratch + parts * width, parts, width, item);
}

void cpu_norm_backward(struct device *device, const struct device_norm_backward *args)
{
    if (args->rows == 0)
        return;
    struct backward backward = {norm_of(device, args->norm, args->width, args->w, args->bias),
                                args};
    struct threads *threads = cpu_of(device)->threads;
    threads_run(threads, row_items(args->rows), backward_rows, &backward);
    threads_run(threads, (args->width + COLUMNS_PER_ITEM - 1) / COLUMNS_PER_ITEM, sum_partials_item,
                &backward);
}

/* ---- the bias of a linear layer ---- */

struct bias {
    float *dbias;
    const float *dy;
    uint64_t rows, width;
};

/* An item owns some columns, so that the tree over rows needs no scratch. */
static void bias_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct bias *b = context;
    uint64_t end = least((item + 1) * COLUMNS_PER_ITEM, b->width);
    for (uint64_t i = item * COLUMNS_PER_ITEM; i < end; i += LANES) {
        uint64_t left = end - i;
        v8 sum = v8_set(0.0f);
        for (uint64_t row = 0; row < b->rows;) {
            v8 part = v8_set(0.0f);
            uint64_t stop = least(row + DEVICE_NORM_ROWS, b->rows);
            for (; row < stop; row++)
                part = _mm256_add_ps(part, v8_load(b->dy + row * b->width + i, left));
            sum = _mm256_add_ps(sum, part);
        }
        v8_store(b->dbias + i, left, _mm256_add_ps(v8_load(b->dbias + i, left), sum));
    }
}

void cpu_linear_backward_bias(struct device *device, float *dbias, const compute_t *dy,
                              uint64_t rows, uint64_t out)
{
    if (rows == 0)
        return;
    struct bias bias = {dbias, cpu_const_floats(dy), rows, out};
    threads_run(cpu_of(device)->threads, (out + COLUMNS_PER_ITEM - 1) / COLUMNS_PER_ITEM, bias_item,
                &bias);
}
