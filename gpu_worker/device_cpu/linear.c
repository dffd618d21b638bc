/* Linear layers: every product of the device goes through gemm_run(). */
#include "gpu_worker/device_cpu/cpu.h"
#include "procs/check.h"

static enum gemm_round rounding_of(const struct device *device)
{
    return device->dtype == DEVICE_BF16 ? GEMM_ROUND_BF16 : GEMM_KEEP_F32;
}

/* elements from one row of a weight to the next */
static uint64_t stride_of(struct device_linear shape)
{
    if (shape.stride != 0)
        return shape.stride;
    return shape.layout == DEVICE_IN_OUT ? shape.out : shape.in;
}

/* y (rows,out) = x (rows,in) w^T */
static struct gemm forward_product(float *y, const float *x, const float *w,
                                   struct device_linear shape)
{
    return (struct gemm){.transpose_b =
                             shape.layout == DEVICE_IN_OUT ? GEMM_AS_IS : GEMM_TRANSPOSED,
                         .m = shape.rows,
                         .n = shape.out,
                         .k = shape.in,
                         .a = x,
                         .lda = shape.in,
                         .b = w,
                         .ldb = stride_of(shape),
                         .c = y,
                         .ldc = shape.out};
}

/* dx (rows,in) = dy (rows,out) w */
static struct gemm input_product(float *dx, const float *dy, const float *w,
                                 struct device_linear shape)
{
    return (struct gemm){.transpose_b =
                             shape.layout == DEVICE_IN_OUT ? GEMM_TRANSPOSED : GEMM_AS_IS,
                         .m = shape.rows,
                         .n = shape.in,
                         .k = shape.out,
                         .a = dy,
                         .lda = shape.out,
                         .b = w,
                         .ldb = stride_of(shape),
                         .c = dx,
                         .ldc = shape.in};
}

/* dw (out,in) += dy (rows,out)^T x (rows,in), or dw (in,out) += x^T dy */
static struct gemm weight_product(float *dw, const float *dy, const float *x,
                                  struct device_linear shape)
{
    int in_out = shape.layout == DEVICE_IN_OUT;
    return (struct gemm){.transpose_a = GEMM_TRANSPOSED,
                         .m = in_out ? shape.in : shape.out,
                         .n = in_out ? shape.out : shape.in,
                         .k = shape.rows,
                         .a = in_out ? x : dy,
                         .lda = in_out ? shape.in : shape.out,
                         .b = in_out ? dy : x,
                         .ldb = in_out ? shape.out : shape.in,
                         .c = dw,
                         .ldc = stride_of(shape),
                         .beta = 1.0f};
}

void cpu_linear_forward(struct device *device, compute_t *y, const compute_t *x, const compute_t *w,
                        const compute_t *residual, struct device_linear shape)
{
    CHECK(residual != y); /* the product would overwrite it before the epilogue reads it */
    if (shape.rows == 0)
        return;
    struct gemm product =
        forward_product(cpu_floats(y), cpu_const_floats(x), cpu_const_floats(w), shape);
    product.round = rounding_of(device);
    if (shape.bias != NULL)
        product.bias = cpu_const_floats(shape.bias);
    if (residual != NULL)
        product.residual = cpu_const_floats(residual);
    gemm_run(cpu_of(device)->threads, &product, 1);
}

void cpu_linear_backward_input(struct device *device, compute_t *dx, enum device_write write,
                               const compute_t *dy, const compute_t *w, struct device_linear shape)
{
    if (shape.rows == 0)
        return;
    struct gemm product =
        input_product(cpu_floats(dx), cpu_const_floats(dy), cpu_const_floats(w), shape);
    product.beta = write == DEVICE_ADD ? 1.0f : 0.0f;
    product.round = rounding_of(device);
    gemm_run(cpu_of(device)->threads, &product, 1);
}

void cpu_linear_backward_weight(struct device *device,
                                const struct device_weight_gradient *gradients, uint64_t n,
                                const compute_t *x, uint64_t rows, uint64_t in)
{
    CHECK(n <= GEMM_BATCH_MAX);
    if (rows == 0)
        return;
    struct gemm products[GEMM_BATCH_MAX];
    for (uint64_t i = 0; i < n; i++) {
        struct device_linear shape = {.rows = rows,
                                      .in = in,
                                      .out = gradients[i].out,
                                      .layout = gradients[i].layout,
                                      .stride = gradients[i].stride};
        products[i] = weight_product(gradients[i].dw, cpu_const_floats(gradients[i].dy),
                                     cpu_const_floats(x), shape);
    }
    gemm_run(cpu_of(device)->threads, products, n);
}

void cpu_head_forward(struct device *device, float *logits, const compute_t *x, const compute_t *w,
                      struct device_linear shape)
{
    struct gemm product = forward_product(logits, cpu_const_floats(x), cpu_const_floats(w), shape);
    gemm_run(cpu_of(device)->threads, &product, 1);
}

void cpu_head_backward_input(struct device *device, compute_t *dx, const float *dlogits,
                             const compute_t *w, struct device_linear shape)
{
    struct gemm product = input_product(cpu_floats(dx), dlogits, cpu_const_floats(w), shape);
    product.round = rounding_of(device);
    gemm_run(cpu_of(device)->threads, &product, 1);
}

void cpu_head_backward_weight(struct device *device, float *dw, const float *dlogits,
                              const compute_t *x, struct device_linear shape)
{
    struct gemm product = weight_product(dw, dlogits, cpu_const_floats(x), shape);
    gemm_run(cpu_of(device)->threads, &product, 1);
}
