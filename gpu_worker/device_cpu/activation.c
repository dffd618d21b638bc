/*
 * Activations: y = f(gate), or y = round(f(gate)) * up. GELU_NEW is transformers' Python
 * expression, rounded at each operation, and its derivative is automatic differentiation of that
 * expression, in the order in which autograd adds; the others are rounded once.
 */
#pragma GCC target("avx2,fma")
#include "gpu_worker/device_cpu/cpu.h"
#include "gpu_worker/device_cpu/simd.h"

enum { ELEMENTS_PER_ITEM = 16384 };

static const float gelu_slope = 0.7978845608f; /* sqrt(2/pi) */
static const float gelu_cube = 0.044715f;

/* f and f' */
struct curve {
    v8 value, slope;
};

static inline struct curve silu(v8 x)
{
    const v8 one = v8_set(1.0f);
    v8 s = v8_sigmoid(x);
    return (struct curve){_mm256_mul_ps(x, s),
                          _mm256_mul_ps(s, v8_fma(x, _mm256_sub_ps(one, s), one))};
}

/* 0.5 (1 + tanh(u)) = 1 / (1 + e^(-2u)), without the cancellation of the left side */
static inline struct curve gelu_tanh(v8 x)
{
    const v8 one = v8_set(1.0f);
    /* f is x or 0 long before; NaN stays NaN */
    v8 t = _mm256_min_ps(v8_set(100.0f), _mm256_max_ps(v8_set(-100.0f), x));
    v8 square = _mm256_mul_ps(t, t);
    v8 u = _mm256_mul_ps(v8_set(2 * gelu_slope),
                         v8_fma(_mm256_mul_ps(square, t), v8_set(gelu_cube), t));
    v8 s = v8_sigmoid(u);
    v8 du = _mm256_mul_ps(v8_set(2 * gelu_slope), v8_fma(square, v8_set(3 * gelu_cube), one));
    v8 ds = _mm256_mul_ps(_mm256_mul_ps(s, _mm256_sub_ps(one, s)), du);
    return (struct curve){_mm256_mul_ps(x, s), v8_fma(t, ds, s)};
}

static inline struct curve gelu(v8 x)
{
    struct v8_normal n = v8_normal(x);
    v8 t = _mm256_min_ps(v8_set(100.0f), _mm256_max_ps(v8_set(-100.0f), x));
    return (struct curve){_mm256_mul_ps(x, n.below), v8_fma(t, n.density, n.below)};
}

static inline v8 product(v8 a, v8 b, enum rounding rounding)
{
    return v8_round(_mm256_mul_ps(a, b), rounding);
}

static inline v8 sum(v8 a, v8 b, enum rounding rounding)
{
    return v8_round(_mm256_add_ps(a, b), rounding);
}

/* tanh(sqrt(2/pi) (x + 0.044715 x^3)) */
static inline v8 gelu_new_tanh(v8 x, enum rounding rounding)
{
    v8 cube = product(product(x, x, rounding), x, rounding);
    v8 inner = sum(x, product(v8_set(gelu_cube), cube, rounding), rounding);
    return v8_round(v8_tanh(product(v8_set(gelu_slope), inner, rounding)), rounding);
}

static inline v8 gelu_new(v8 x, enum rounding rounding)
{
    v8 factor = sum(v8_set(1.0f), gelu_new_tanh(x, rounding), rounding);
    return product(product(v8_set(0.5f), x, rounding), factor, rounding);
}

/* d: derivative by f -> derivative by x */
static inline v8 gelu_new_backward(v8 x, v8 d, enum rounding rounding)
{
    const v8 one = v8_set(1.0f);
    v8 t = gelu_new_tanh(x, rounding);
    v8 dhalf = product(d, sum(one, t, rounding), rounding);
    v8 dt = product(d, product(v8_set(0.5f), x, rounding), rounding);
    v8 slope = _mm256_sub_ps(one, _mm256_mul_ps(t, t));
    v8 dinner = product(product(dt, slope, rounding), v8_set(gelu_slope), rounding);
    v8 dcube = product(dinner, v8_set(gelu_cube), rounding);
    v8 square = product(x, x, rounding);
    v8 dx = product(dcube, product(v8_set(3.0f), square, rounding), rounding);
    return sum(sum(dinner, dx, rounding), product(dhalf, v8_set(0.5f), rounding), rounding);
}

static inline struct curve curve(enum device_activation activation, v8 x)
{
    switch (activation) {
    case DEVICE_GELU_TANH:
        return gelu_tanh(x);
    case DEVICE_GELU:
        return gelu(x);
    case DEVICE_SILU:
    case DEVICE_GELU_NEW:
        break;
    }
    return silu(x);
}

static inline v8 activate(enum device_activation activation, v8 x, enum rounding rounding)
{
    return activation == DEVICE_GELU_NEW ? gelu_new(x, rounding)
                                         : v8_round(curve(activation, x).value, rounding);
}

static inline v8 derive(enum device_activation activation, v8 x, v8 d, enum rounding rounding)
{
    return activation == DEVICE_GELU_NEW ? gelu_new_backward(x, d, rounding)
                                         : product(d, curve(activation, x).slope, rounding);
}

static uint64_t item_end(uint64_t item, uint64_t elements)
{
    uint64_t end = (item + 1) * ELEMENTS_PER_ITEM;
    return end < elements ? end : elements;
}

static uint64_t items_of(uint64_t elements)
{
    return (elements + ELEMENTS_PER_ITEM - 1) / ELEMENTS_PER_ITEM;
}

struct forward {
    const struct device_activation_forward *args;
    enum rounding rounding;
};

static void forward_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct forward *f = context;
    const float *gate = cpu_const_floats(f->args->gate);
    const float *up = f->args->up == NULL ? NULL : cpu_const_floats(f->args->up);
    float *y = cpu_floats(f->args->y);
    uint64_t end = item_end(item, f->args->elements);
    for (uint64_t i = item * ELEMENTS_PER_ITEM; i < end; i += LANES) {
        uint64_t left = end - i;
        v8 value = activate(f->args->activation, v8_load(gate + i, left), f->rounding);
        if (up != NULL)
            value = product(value, v8_load(up + i, left), f->rounding);
        v8_store(y + i, left, value);
    }
}

void cpu_activation_forward(struct device *device, const struct device_activation_forward *args)
{
    struct forward f = {args, rounding_of(device)};
    threads_run(cpu_of(device)->threads, items_of(args->elements), forward_item, &f);
}

struct backward {
    const struct device_activation_backward *args;
    enum rounding rounding;
};

/* Elements i.. of a gated activation; the derivative by f. */
static inline v8 gated_backward(const struct backward *b, v8 value, v8 dy, uint64_t i,
                                uint64_t left)
{
    const struct device_activation_backward *args = b->args;
    v8 up = v8_load(cpu_const_floats(args->up) + i, left);
    v8_store(cpu_floats(args->dup) + i, left, product(dy, value, b->rounding));
    if (args->y != NULL)
        v8_store(cpu_floats(args->y) + i, left, product(value, up, b->rounding));
    return product(dy, up, b->rounding);
}

static void backward_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct backward *b = context;
    const struct device_activation_backward *args = b->args;
    uint64_t end = item_end(item, args->elements);
    for (uint64_t i = item * ELEMENTS_PER_ITEM; i < end; i += LANES) {
        uint64_t left = end - i;
        v8 gate = v8_load(cpu_const_floats(args->gate) + i, left);
        v8 d = v8_load(cpu_const_floats(args->dy) + i, left);
        v8 value = activate(args->activation, gate, b->rounding);
        if (args->up != NULL)
            d = gated_backward(b, value, d, i, left);
        else if (args->y != NULL)
            v8_store(cpu_floats(args->y) + i, left, value);
        v8_store(cpu_floats(args->dgate) + i, left, derive(args->activation, gate, d, b->rounding));
    }
}

void cpu_activation_backward(struct device *device, const struct device_activation_backward *args)
{
    struct backward b = {args, rounding_of(device)};
    threads_run(cpu_of(device)->threads, items_of(args->elements), backward_item, &b);
}
