/*
 * Every operation of the device against a plain twin in f64, over odd shapes, in f32 and bf16.
 *
 * In bf16 the inputs are bf16 numbers and, where check() is used, the twin rounds nothing, so that
 * results may be off by the roundings of the operation; that they are bf16 numbers is checked too.
 * That those roundings are in the right places is the business of test_layers_goldens.
 */
#include "tests/numeric/test_device_fixture.h"

static void memory_goes_in_and_out_in_both_dtypes(void **state)
{
    (void)state;
    enum { N = 40001 };
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        float *host = numbers(device, N, 3), *back = numbers(device, N, 0);
        uint16_t *half = malloc(N * sizeof *half);
        compute_t *there = device->ops->alloc(device, N * device->compute_bytes);
        device->ops->load(device, there, host, DEVICE_HOST_F32, N);
        device->ops->store(device, back, DEVICE_HOST_F32, there, N);
        assert_memory_equal(back, host, N * sizeof *host);
        device->ops->store(device, half, DEVICE_HOST_BF16, there, N);
        device->ops->zero(device, there, N * device->compute_bytes);
        device->ops->load(device, there, half, DEVICE_HOST_BF16, N);
        device->ops->store(device, back, DEVICE_HOST_F32, there, N);
        for (uint64_t i = 0; i < N; i++)
            assert_true(back[i] == to_bf16(host[i]));
        device->ops->free(device, there);
        free(half);
        free(host);
        free(back);
    }
}

/* One operation may outlast the watchdog, so the heartbeat goes on inside of it. */
static void an_operation_counts_up_the_heartbeat(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        _Atomic uint64_t beats = 0;
        float *a = device->ops->alloc(device, N * sizeof *a);
        float *b = device->ops->alloc(device, N * sizeof *b);
        device->ops->zero(device, a, N * sizeof *a);
        device->ops->zero(device, b, N * sizeof *b);
        device_cpu_set_heartbeat(device, &beats);
        for (int i = 0; i < 100 && beats == 0; i++) /* the other threads may be quicker */
            device->ops->add(device, a, b, N);
        device_cpu_set_heartbeat(device, NULL);
        assert_true(beats > 0);
        device->ops->free(device, a);
        device->ops->free(device, b);
    }
}

static void embedding_gathers_and_its_gradient_scatters(void **state)
{
    (void)state;
    enum { V = 11, C = 77, R = 50 };
    static const int32_t skipped[] = {-1, 4};
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        int32_t tokens[R];
        float *table = numbers(device, V * C, 1), *x = numbers(device, R * C, 1);
        float *dx = numbers(device, R * C, 1), *dtable = numbers(device, V * C, 1);
        double *expected = zeros(R * C), *gradient = zeros(V * C);
        for (uint64_t i = 0; i < V * C; i++)
            gradient[i] = (double)dtable[i];
        for (uint64_t r = 0; r < R; r++) {
            tokens[r] = (int32_t)(r * r % V);
            for (uint64_t c = 0; c < C; c++) {
                expected[r * C + c] = (double)table[(uint64_t)tokens[r] * C + c];
                if (tokens[r] != skipped[d])
                    gradient[(uint64_t)tokens[r] * C + c] += (double)dx[r * C + c];
            }
        }
        struct device_embedding shape = {
            .rows = R, .width = C, .tokens = tokens, .skipped_token = skipped[d]};
        device->ops->embedding_forward(device, cells(x), cells(table), NULL, &shape);
        device->ops->embedding_backward(device, dtable, NULL, cells(dx), &shape);
        check("embedding", device, x, expected, R * C, DEVICE_BF16, 0);
        check("dtable", devices[0], dtable, gradient, V * C, DEVICE_F32, 1);
        free(table);
        free(x);
        free(dx);
        free(dtable);
    }
}

static void linear_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    enum { R = 70, IN = 45, OUT = 83 };
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        struct device_linear shape = {.rows = R, .in = IN, .out = OUT};
        float *x = numbers(device, R * IN, 1), *w = numbers(device, OUT * IN, 1);
        float *y = numbers(device, R * OUT, 1), *residual = numbers(device, R * OUT, 1);
        float *dy = numbers(device, R * OUT, 1), *dx = numbers(device, R * IN, 1);
        float *dw = numbers(devices[0], OUT * IN, 1);
        double *ey = zeros(R * OUT), *edx = zeros(R * IN), *edw = zeros(OUT * IN);
        for (uint64_t i = 0; i < R * OUT; i++)
            ey[i] = (double)residual[i];
        for (uint64_t i = 0; i < R * IN; i++)
            edx[i] = (double)dx[i];
        for (uint64_t i = 0; i < OUT * IN; i++)
            edw[i] = (double)dw[i];
        for (uint64_t r = 0; r < R; r++)
            for (uint64_t o = 0; o < OUT; o++)
                for (uint64_t i = 0; i < IN; i++) {
                    ey[r * OUT + o] += (double)x[r * IN + i] * (double)w[o * IN + i];
                    edx[r * IN + i] += (double)dy[r * OUT + o] * (double)w[o * IN + i];
                    edw[o * IN + i] += (double)dy[r * OUT + o] * (double)x[r * IN + i];
                }
        device->ops->linear_forward(device, cells(y), cells(x), cells(w), cells(residual), shape);
        device->ops->linear_backward_input(device, cells(dx), DEVICE_ADD, cells(dy), cells(w),
                                           shape);
        device->ops->linear_backward_weight(
            device, &(struct device_weight_gradient){.dw = dw, .dy = cells(dy), .out = OUT}, 1,
            cells(x), R, IN);
        check("y", device, y, ey, R * OUT, DEVICE_BF16, 2);
        check("dx", device, dx, edx, R * IN, DEVICE_BF16, 2);
        check("dw", devices[0], dw, edw, OUT * IN, DEVICE_F32, 2);
        float *all[] = {x, w, y, residual, dy, dx, dw};
        for (int i = 0; i < 7; i++)
            free(all[i]);
    }
}

static void rope_rotates_and_its_backward_turns_back(void **state)
{
    (void)state;
    enum { R = 41, H = 3, D = 14, POSITIONS = 60 };
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        float *cosine = numbers(device, POSITIONS * D / 2, 1);
        float *sine = numbers(device, POSITIONS * D / 2, 1);
        int32_t position[R];
        float *x = numbers(device, R * H * D, 1), *y = numbers(device, R * H * D, 1);
        double *there = zeros(R * H * D), *back = zeros(R * H * D);
        for (uint64_t r = 0; r < R; r++) {
            position[r] = (int32_t)(r * 31 % POSITIONS);
            for (uint64_t h = 0; h < H; h++)
                for (uint64_t i = 0; i < D / 2; i++) {
                    uint64_t at = (r * H + h) * D + i, angle = (uint64_t)position[r] * D / 2 + i;
                    double a = (double)x[at], b = (double)x[at + D / 2];
                    double c = (double)cosine[angle], s = (double)sine[angle];
                    there[at] = a * c - b * s;
                    there[at + D / 2] = b * c + a * s;
                    back[at] = a * c + b * s;
                    back[at + D / 2] = b * c - a * s;
                }
        }
        struct device_rope shape = {R, H, D, cosine, sine, position, 0};
        memcpy(y, x, R * H * D * sizeof *y);
        device->ops->rope(device, cells(y), shape, DEVICE_FORWARD);
        check("forward", device, y, there, R * H * D, DEVICE_BF16, 2);
        memcpy(y, x, R * H * D * sizeof *y);
        device->ops->rope(device, cells(y), shape, DEVICE_BACKWARD);
        check("backward", device, y, back, R * H * D, DEVICE_BF16, 2);
        free(cosine);
        free(sine);
        free(x);
        free(y);
    }
}

static void cross_entropy_and_its_gradient_match_the_twin(void **state)
{
    (void)state;
    enum { R = 5 };
    static const uint64_t vocabularies[] = {1, 3, 8, 61, 259, 5003};
    for (int v = 0; v < 6; v++) {
        uint64_t V = vocabularies[v];
        struct device *device = devices[0];
        int32_t labels[R] = {0, -1, (int32_t)(V - 1), (int32_t)(V / 2), 0};
        float *logits = numbers(device, R * V, 20);
        double *gradient = zeros(R * V), loss[R], only[R], expected_loss[R];
        for (uint64_t r = 0; r < R; r++) {
            double most = -1e30, sum = 0;
            for (uint64_t i = 0; i < V; i++)
                most = fmax(most, (double)logits[r * V + i]);
            for (uint64_t i = 0; i < V; i++)
                sum += exp((double)logits[r * V + i] - most);
            expected_loss[r] =
                labels[r] < 0 ? 0 : log(sum) + most - (double)logits[r * V + (uint64_t)labels[r]];
            for (uint64_t i = 0; i < V && labels[r] >= 0; i++)
                gradient[r * V + i] = (exp((double)logits[r * V + i] - most) / sum -
                                       (i == (uint64_t)labels[r] ? 1 : 0)) *
                                      0.25;
        }
        struct device_cross_entropy shape = {R, V, 0.25f, 0.0f};
        float *copy = malloc(R * V * sizeof *copy);
        memcpy(copy, logits, R * V * sizeof *copy);
        device->ops->cross_entropy(device, only, copy, labels, shape, DEVICE_LOSS_ONLY);
        device->ops->cross_entropy(device, loss, logits, labels, shape, DEVICE_LOSS_AND_GRADIENT);
        for (int r = 0; r < R; r++) {
            assert_true(fabs(loss[r] - expected_loss[r]) <= 2e-6 * (1 + expected_loss[r]));
            assert_true(loss[r] == only[r]);
        }
        if (V > 1)
            check("dlogits", device, logits, gradient, R * V, DEVICE_F32, 2);
        else
            free(gradient);
        free(logits);
        free(copy);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_goes_in_and_out_in_both_dtypes),
        cmocka_unit_test(an_operation_counts_up_the_heartbeat),
        cmocka_unit_test(embedding_gathers_and_its_gradient_scatters),
        cmocka_unit_test(linear_and_its_gradients_match_the_twin),
        cmocka_unit_test(rope_rotates_and_its_backward_turns_back),
        cmocka_unit_test(cross_entropy_and_its_gradient_match_the_twin),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
