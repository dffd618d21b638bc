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

static void check_embedding(int d, float scale, int placed)
{
    enum { V = 11, P = 9, C = 77, R = 50 };
    struct device *device = devices[d];
    int32_t tokens[R], positions[R];
    float *table = numbers(device, V * C, 1), *places = numbers(device, P * C, 1);
    float *x = floats(R * C), *dx = numbers(device, R * C, 1), *again = floats(R * C);
    float *dtable = numbers(devices[0], V * C, 1), *dplaces = numbers(devices[0], P * C, 1);
    double *expected = zeros(R * C), *gradient = zeros(V * C), *place_gradient = zeros(P * C);
    double factor = scale == 0.0f ? 1 : rounded(device, (double)scale);
    for (uint64_t i = 0; i < V * C; i++)
        gradient[i] = (double)dtable[i];
    for (uint64_t i = 0; i < P * C; i++)
        place_gradient[i] = (double)dplaces[i];
    for (uint64_t row = 0; row < R; row++) {
        tokens[row] = (int32_t)(row * row % V);
        positions[row] = (int32_t)(row % P);
        for (uint64_t c = 0; c < C; c++) {
            uint64_t i = row * C + c, token = (uint64_t)tokens[row] * C + c;
            uint64_t place = (uint64_t)positions[row] * C + c;
            double sum = (double)table[token] * factor + (placed ? (double)places[place] : 0);
            expected[i] = rounded(device, sum);
            gradient[token] += rounded(device, (double)dx[i] * factor);
            place_gradient[place] += placed ? (double)dx[i] : 0;
        }
    }
    struct device_embedding shape = {R, C, tokens, placed ? positions : NULL, scale, -1};
    device->ops->embedding_forward(device, cells(x), cells(table), cells(places), &shape);
    alone[d]->ops->embedding_forward(alone[d], cells(again), cells(table), cells(places), &shape);
    device->ops->embedding_backward(device, dtable, dplaces, cells(dx), &shape);
    check_same("x", x, again, R * C);
    check_rounding("x", device, x, expected, R * C);
    check("dtable", devices[0], dtable, gradient, V * C, DEVICE_F32, 1);
    check("dplaces", devices[0], dplaces, place_gradient, P * C, DEVICE_F32, 1);
    float *all[] = {table, places, x, dx, dtable, dplaces};
    for (int i = 0; i < 6; i++)
        free(all[i]);
}

static void an_embedding_has_a_scale_or_learned_positions(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        check_embedding(d, 8.7749643f, 0); /* sqrt(77); in bf16 8.75 */
        check_embedding(d, 0, 1);
    }
}

static void a_residual_stream_is_rounded_at_each_addition(void **state)
{
    (void)state;
    enum { N = 16384 + 77 };
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        float *to = numbers(device, N, 1), *from = numbers(device, N, 3);
        double *expected = zeros(N);
        for (uint64_t i = 0; i < N; i++)
            expected[i] = rounded(device, (double)to[i] + (double)from[i]);
        device->ops->accumulate(device, cells(to), cells(from), N);
        check_rounding("sum", device, to, expected, N);
        free(to);
        free(from);
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

/* A layer whose weight is part of a wider one: rows of an (all, in), columns of an (in, all). */
struct wide_linear {
    uint64_t rows, in, out, all, offset;
    enum device_layout layout;
};

static uint64_t wide_index(const struct wide_linear *c, uint64_t out, uint64_t in)
{
    return c->layout == DEVICE_IN_OUT ? in * c->all + c->offset + out
                                      : (c->offset + out) * c->in + in;
}

struct wide_arrays {
    float *x, *w, *bias, *dy; /* inputs */
    float *y, *dx, *dw, *db;
};

static void run_wide_linear(struct device *device, const struct wide_linear *c,
                            const struct wide_arrays *a)
{
    struct device_linear shape = {.rows = c->rows,
                                  .in = c->in,
                                  .out = c->out,
                                  .layout = c->layout,
                                  .stride = c->layout == DEVICE_IN_OUT ? c->all : 0,
                                  .bias = cells(a->bias)};
    uint64_t start = wide_index(c, 0, 0);
    const compute_t *part = cells(a->w + start);
    device->ops->linear_forward(device, cells(a->y), cells(a->x), part, NULL, shape);
    device->ops->linear_backward_input(device, cells(a->dx), DEVICE_SET, cells(a->dy), part, shape);
    device->ops->linear_backward_weight(device,
                                        &(struct device_weight_gradient){.dw = a->dw + start,
                                                                         .dy = cells(a->dy),
                                                                         .out = c->out,
                                                                         .layout = c->layout,
                                                                         .stride = shape.stride},
                                        1, cells(a->x), c->rows, c->in);
    device->ops->linear_backward_bias(device, a->db, cells(a->dy), c->rows, c->out);
}

static void check_wide_linear(int d, const struct wide_linear *c)
{
    struct device *device = devices[d];
    uint64_t nx = c->rows * c->in, ny = c->rows * c->out, nw = c->all * c->in;
    float *x = numbers(device, nx, 1), *w = numbers(device, nw, 1), *dy = numbers(device, ny, 1);
    float *bias = numbers(device, c->out, 9), *y = floats(ny), *dx = floats(nx);
    float *dw = numbers(devices[0], nw, 1), *db = numbers(devices[0], c->out, 1);
    float *again[] = {floats(ny), floats(nx), floats(nw), floats(c->out)};
    memcpy(again[2], dw, nw * sizeof *dw);
    memcpy(again[3], db, c->out * sizeof *db);
    double *ey = zeros(ny), *edx = zeros(nx), *edw = zeros(nw), *edb = zeros(c->out);
    for (uint64_t i = 0; i < nw; i++)
        edw[i] = (double)dw[i];
    for (uint64_t o = 0; o < c->out; o++)
        edb[o] = (double)db[o];
    for (uint64_t row = 0; row < c->rows; row++)
        for (uint64_t o = 0; o < c->out; o++) {
            double sum = (double)bias[o], dyo = (double)dy[row * c->out + o];
            for (uint64_t i = 0; i < c->in; i++) {
                double xi = (double)x[row * c->in + i];
                sum += xi * (double)w[wide_index(c, o, i)];
                edx[row * c->in + i] += dyo * (double)w[wide_index(c, o, i)];
                edw[wide_index(c, o, i)] += dyo * xi;
            }
            edb[o] += dyo;
            ey[row * c->out + o] = rounded(device, sum);
        }
    for (uint64_t i = 0; i < nx; i++)
        edx[i] = rounded(device, edx[i]);
    run_wide_linear(device, c, &(struct wide_arrays){x, w, bias, dy, y, dx, dw, db});
    run_wide_linear(alone[d], c,
                    &(struct wide_arrays){x, w, bias, dy, again[0], again[1], again[2], again[3]});
    check_same("y", y, again[0], ny);
    check_same("dx", dx, again[1], nx);
    check_same("dw", dw, again[2], nw);
    check_same("db", db, again[3], c->out);
    check_rounding("y", device, y, ey, ny);
    check_rounding("dx", device, dx, edx, nx);
    check("dw", devices[0], dw, edw, nw, DEVICE_F32, 2);
    check("db", devices[0], db, edb, c->out, DEVICE_F32, 2);
    float *all[] = {x, w, dy, bias, y, dx, dw, db};
    for (int i = 0; i < 8; i++)
        free(all[i]);
}

/* One rounding of product and bias; Conv1D's (in, out); a part of c_attn or qkv_proj, whose other
 * parts stay as they are (check() compares all of dw). */
static void linear_layers_with_bias_and_of_both_layouts_match_the_twin(void **state)
{
    (void)state;
    static const struct wide_linear cases[] = {
        {70, 45, 83, 83, 0, DEVICE_OUT_IN},   {70, 45, 83, 83, 0, DEVICE_IN_OUT},
        {33, 40, 50, 120, 25, DEVICE_OUT_IN}, {33, 40, 50, 120, 25, DEVICE_IN_OUT},
        {1, 9, 3, 7, 4, DEVICE_IN_OUT},       {300, 20, 300, 601, 300, DEVICE_IN_OUT},
    };
    for (int d = 0; d < 2; d++)
        for (uint64_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
            check_wide_linear(d, &cases[i]);
}

static void a_layer_without_rows_changes_nothing(void **state)
{
    (void)state;
    float w[12] = {0}, dw[12], before[12], x = 1;
    for (int i = 0; i < 12; i++)
        dw[i] = before[i] = (float)i - 0.5f;
    struct device *device = devices[1];
    struct device_linear shape = {.rows = 0, .in = 3, .out = 4};
    device->ops->linear_forward(device, cells(&x), NULL, cells(w), NULL, shape);
    device->ops->linear_backward_input(device, cells(&x), DEVICE_SET, NULL, cells(w), shape);
    device->ops->linear_backward_weight(
        device, &(struct device_weight_gradient){.dw = dw, .out = 4}, 1, NULL, 0, 3);
    assert_memory_equal(dw, before, sizeof dw);
    assert_true(x == 1.0f);
}

static void check_rope(uint64_t turned)
{
    enum { R = 41, H = 3, D = 14, POSITIONS = 60 };
    uint64_t P = turned == 0 ? D : turned;
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        float *cosine = numbers(device, POSITIONS * P / 2, 1);
        float *sine = numbers(device, POSITIONS * P / 2, 1);
        int32_t position[R];
        float *x = numbers(device, R * H * D, 1), *y = numbers(device, R * H * D, 1);
        double *there = zeros(R * H * D), *back = zeros(R * H * D);
        for (uint64_t r = 0; r < R; r++) {
            position[r] = (int32_t)(r * 31 % POSITIONS);
            for (uint64_t h = 0; h < H; h++) {
                for (uint64_t i = 0; i < D; i++)
                    there[(r * H + h) * D + i] = back[(r * H + h) * D + i] =
                        (double)x[(r * H + h) * D + i];
                for (uint64_t i = 0; i < P / 2; i++) {
                    uint64_t at = (r * H + h) * D + i, angle = (uint64_t)position[r] * P / 2 + i;
                    double a = (double)x[at], b = (double)x[at + P / 2];
                    double c = (double)cosine[angle], s = (double)sine[angle];
                    there[at] = a * c - b * s;
                    there[at + P / 2] = b * c + a * s;
                    back[at] = a * c + b * s;
                    back[at + P / 2] = b * c - a * s;
                }
            }
        }
        struct device_rope shape = {R, H, D, cosine, sine, position, turned};
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

static void rope_rotates_and_its_backward_turns_back(void **state)
{
    (void)state;
    check_rope(0);
}

static void a_leading_part_of_each_head_may_turn_alone(void **state)
{
    (void)state;
    check_rope(6);
    check_rope(14);
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

static void soft_capped_logits_and_their_gradient_match_the_twin(void **state)
{
    (void)state;
    enum { R = 4, V = 1003 };
    const double cap = 7, scale = 0.25;
    struct device *device = devices[0];
    int32_t labels[R] = {0, -1, V - 1, 17};
    float *raw = numbers(device, R * V, 20), *capped = floats(R * V), *logits = floats(R * V);
    double *expected = zeros(R * V), *gradient = zeros(R * V), loss[R], only[R];
    memcpy(capped, raw, R * V * sizeof *raw);
    device->ops->softcap(device, capped, (float)cap, R * V);
    memcpy(logits, capped, R * V * sizeof *raw);
    struct device_cross_entropy shape = {R, V, (float)scale, (float)cap};
    device->ops->cross_entropy(device, only, logits, labels, shape, DEVICE_LOSS_ONLY);
    memcpy(logits, capped, R * V * sizeof *raw);
    device->ops->cross_entropy(device, loss, logits, labels, shape, DEVICE_LOSS_AND_GRADIENT);
    for (uint64_t row = 0; row < R; row++) {
        double sum = 0;
        for (uint64_t i = 0; i < V; i++) {
            expected[row * V + i] = cap * tanh((double)raw[row * V + i] / cap);
            sum += exp(expected[row * V + i]);
        }
        if (labels[row] < 0) {
            assert_true(loss[row] == 0 && only[row] == 0);
            continue;
        }
        uint64_t label = (uint64_t)labels[row];
        assert_true(fabs(loss[row] - (log(sum) - expected[row * V + label])) <= 1e-5);
        assert_true(loss[row] == only[row]);
        for (uint64_t i = 0; i < V; i++) {
            double p = exp(expected[row * V + i]) / sum, t = expected[row * V + i] / cap;
            gradient[row * V + i] = (p - (i == label ? 1 : 0)) * scale * (1 - t * t);
            double error = fabs((double)logits[row * V + i] - gradient[row * V + i]);
            assert_true(error <= 1e-7 + 2e-6 * fabs(gradient[row * V + i]));
        }
    }
    check("capped", device, capped, expected, R * V, DEVICE_F32, 1);
    free(gradient);
    free(raw);
    free(logits);
    free(capped);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_goes_in_and_out_in_both_dtypes),
        cmocka_unit_test(an_operation_counts_up_the_heartbeat),
        cmocka_unit_test(embedding_gathers_and_its_gradient_scatters),
        cmocka_unit_test(an_embedding_has_a_scale_or_learned_positions),
        cmocka_unit_test(a_residual_stream_is_rounded_at_each_addition),
        cmocka_unit_test(linear_and_its_gradients_match_the_twin),
        cmocka_unit_test(linear_layers_with_bias_and_of_both_layouts_match_the_twin),
        cmocka_unit_test(a_layer_without_rows_changes_nothing),
        cmocka_unit_test(rope_rotates_and_its_backward_turns_back),
        cmocka_unit_test(a_leading_part_of_each_head_may_turn_alone),
        cmocka_unit_test(cross_entropy_and_its_gradient_match_the_twin),
        cmocka_unit_test(soft_capped_logits_and_their_gradient_match_the_twin),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
