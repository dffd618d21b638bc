/* Activations, plain and gated, against a plain twin in f64 that rounds where transformers does. */
#include "tests/numeric/test_device_fixture.h"

enum { N = 16384 + 77 };

static const double root = 0.79788456080286535588; /* sqrt(2/pi) */

static double r(const struct device *device, double x)
{
    return rounded(device, x);
}

/* tanh(sqrt(2/pi) (x + 0.044715 x^3)), rounded at each operation */
static double new_tanh(const struct device *device, double x)
{
    double cube = r(device, r(device, x * x) * x);
    double inner = r(device, x + r(device, 0.044715 * cube));
    return r(device, tanh(r(device, root * inner)));
}

static double value(const struct device *device, enum device_activation a, double x)
{
    switch (a) {
    case DEVICE_SILU:
        return r(device, x / (1 + exp(-x)));
    case DEVICE_GELU_NEW:
        return r(device, r(device, 0.5 * x) * r(device, 1 + new_tanh(device, x)));
    case DEVICE_GELU_TANH:
        return r(device, x / (1 + exp(-2 * root * (x + 0.044715 * x * x * x))));
    case DEVICE_GELU:
        break;
    }
    return r(device, 0.5 * x * erfc(-x / sqrt(2)));
}

/* torch's derivative of gelu_new's Python expression */
static double new_derivative(const struct device *device, double x, double d)
{
    double t = new_tanh(device, x);
    double dhalf = r(device, d * r(device, 1 + t));
    double dt = r(device, d * r(device, 0.5 * x));
    double dinner = r(device, r(device, dt * (1 - t * t)) * root);
    double dcube = r(device, dinner * 0.044715);
    double dx = r(device, dcube * r(device, 3 * r(device, x * x)));
    return r(device, r(device, dinner + dx) + r(device, dhalf * 0.5));
}

static double derivative(const struct device *device, enum device_activation a, double x, double d)
{
    double u = 2 * root * (x + 0.044715 * x * x * x), du = 2 * root * (1 + 3 * 0.044715 * x * x);
    double s = 1 / (1 + exp(-x)), half = 1 / (1 + exp(-u)); /* (1 + tanh(u / 2)) / 2 */
    switch (a) {
    case DEVICE_SILU:
        return r(device, d * s * (1 + x * (1 - s)));
    case DEVICE_GELU_NEW:
        return new_derivative(device, x, d);
    case DEVICE_GELU_TANH:
        return r(device, d * half * (1 + (x == 0 || fabs(u) > 700 ? 0 : x * du / (1 + exp(u)))));
    case DEVICE_GELU:
        break;
    }
    return r(device,
             d * (0.5 * erfc(-x / sqrt(2)) + x * exp(-x * x / 2) * 0.5 * M_2_SQRTPI / sqrt(2)));
}

struct arrays {
    float *gate, *up, *y, *dy, *dgate, *dup, *again;
};

static struct arrays arrays_of(const struct device *device)
{
    struct arrays a = {.gate = numbers(device, N, 8), .up = numbers(device, N, 2)};
    a.y = numbers(device, N, 1);
    a.dy = numbers(device, N, 1);
    a.dgate = numbers(device, N, 1);
    a.dup = numbers(device, N, 1);
    a.again = numbers(device, N, 1);
    static const float special[] = {-200, 200, 0, -0.0f, 1e-30f, -1e30f, 1e30f};
    for (uint64_t i = 0; i < sizeof special / sizeof special[0]; i++)
        a.gate[i] = (float)rounded(device, (double)special[i]);
    for (uint64_t i = 100; i < 2000; i++)
        a.gate[i] = (float)rounded(device, (double)a.gate[i] / 100);
    return a;
}

static void arrays_close(struct arrays a)
{
    float *all[] = {a.gate, a.up, a.y, a.dy, a.dgate, a.dup, a.again};
    for (int i = 0; i < 7; i++)
        free(all[i]);
}

static void run(struct device *device, enum device_activation activation, struct arrays a,
                int gated)
{
    compute_t *up = gated ? cells(a.up) : NULL;
    device->ops->activation_forward(
        device, &(struct device_activation_forward){activation, N, cells(a.y), cells(a.gate), up});
    device->ops->activation_backward(
        device, &(struct device_activation_backward){activation, N, cells(a.dgate),
                                                     gated ? cells(a.dup) : NULL, cells(a.again),
                                                     cells(a.dy), cells(a.gate), up});
}

static void check_activation(int d, enum device_activation activation, int gated)
{
    struct device *device = devices[d];
    uint64_t start = random_state;
    struct arrays a = arrays_of(device);
    random_state = start;
    struct arrays other = arrays_of(alone[d]);
    /* x^3 of 1e30 is no f32: the reference has no number there either */
    uint64_t first = activation == DEVICE_GELU_NEW ? 7 : 0;
    double *ey = zeros(N), *edgate = zeros(N), *edup = zeros(N);
    run(device, activation, a, gated);
    run(alone[d], activation, other, gated);
    assert_memory_equal(other.y, a.y, N * sizeof *a.y);
    assert_memory_equal(other.dgate, a.dgate, N * sizeof *a.y);
    assert_memory_equal(a.again, a.y, N * sizeof *a.y);
    for (uint64_t i = 0; i < N; i++) {
        double up = gated ? (double)a.up[i] : 1, x = (double)a.gate[i], dy = (double)a.dy[i];
        double f = value(device, activation, x);
        ey[i] = i < first ? (double)a.y[i] : r(device, f * up);
        edup[i] = gated ? r(device, dy * f) : (double)a.dup[i];
        if (i < first)
            edup[i] = (double)a.dup[i];
        edgate[i] =
            i < first ? (double)a.dgate[i] : derivative(device, activation, x, r(device, dy * up));
    }
    uint64_t skip = 7; /* beside 1e30 the others have no weight in check()'s root mean square */
    for (uint64_t i = first; i < skip; i++)
        assert_true(fabs((double)a.y[i] - ey[i]) <= 8e-3 * fabs(ey[i]) + 1e-30 &&
                    fabs((double)a.dgate[i] - edgate[i]) <= 8e-3 * fabs(edgate[i]) + 1e-30);
    for (uint64_t i = 0; i < skip; i++) {
        a.y[i] = a.dgate[i] = a.dup[i] = 0;
        ey[i] = edgate[i] = edup[i] = 0;
    }
    check_rounding("y", device, a.y, ey, N);
    check_rounding("dgate", device, a.dgate, edgate, N);
    check_rounding("dup", device, a.dup, edup, N);
    arrays_close(a);
    arrays_close(other);
}

static void check_both(enum device_activation activation)
{
    for (int d = 0; d < 2; d++)
        for (int gated = 0; gated < 2; gated++)
            check_activation(d, activation, gated);
}

static void silu_matches_the_twin(void **state)
{
    (void)state;
    check_both(DEVICE_SILU);
}

static void gelu_tanh_matches_the_twin(void **state)
{
    (void)state;
    check_both(DEVICE_GELU_TANH);
}

static void exact_gelu_matches_the_twin(void **state)
{
    (void)state;
    check_both(DEVICE_GELU);
}

static void gelu_new_is_rounded_at_each_operation(void **state)
{
    (void)state;
    check_both(DEVICE_GELU_NEW);
}

/* As the block template calls it: derivatives over gate and up, y over dy. */
static void activations_work_in_place(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++)
        for (int kind = 0; kind < 4; kind++)
            for (int gated = 0; gated < 2; gated++) {
                enum device_activation activation = (enum device_activation)kind;
                struct arrays a = arrays_of(devices[d]);
                float *gate = floats(N), *up = floats(N), *dy = floats(N);
                memcpy(gate, a.gate, N * sizeof *gate);
                memcpy(up, a.up, N * sizeof *up);
                memcpy(dy, a.dy, N * sizeof *dy);
                run(devices[d], activation, a, gated);
                devices[d]->ops->activation_backward(
                    devices[d], &(struct device_activation_backward){
                                    activation, N, cells(gate), gated ? cells(up) : NULL, cells(dy),
                                    cells(dy), cells(gate), gated ? cells(up) : NULL});
                assert_memory_equal(gate, a.dgate, N * sizeof *gate);
                assert_memory_equal(dy, a.y, N * sizeof *gate);
                if (gated)
                    assert_memory_equal(up, a.dup, N * sizeof *gate);
                free(gate);
                free(up);
                free(dy);
                arrays_close(a);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(silu_matches_the_twin),
        cmocka_unit_test(gelu_tanh_matches_the_twin),
        cmocka_unit_test(exact_gelu_matches_the_twin),
        cmocka_unit_test(gelu_new_is_rounded_at_each_operation),
        cmocka_unit_test(activations_work_in_place),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
