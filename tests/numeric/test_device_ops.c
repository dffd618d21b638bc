/*
 * Every operation of the device against a plain twin in f64, over odd shapes, in f32 and bf16.
 *
 * In bf16 the inputs are bf16 numbers and the twin rounds nothing, so that results may be off by
 * the roundings of the operation; that they are bf16 numbers is checked too. That the roundings are
 * in the right places is the business of test_layers_goldens.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu_worker/device.h"
#include "procs/error.h"

static struct device *devices[2]; /* f32, bf16 */

static uint64_t random_state = 12345;

static double uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 40) / (double)(1 << 24) * 2 - 1;
}

static float to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* n numbers in [-size, size] that the dtype has, and a guard behind them */
static float *numbers(const struct device *device, uint64_t n, double size)
{
    float *x = malloc((n + 1) * sizeof *x);
    assert_non_null(x);
    for (uint64_t i = 0; i < n; i++) {
        x[i] = (float)(uniform() * size);
        if (device->dtype == DEVICE_BF16)
            x[i] = to_bf16(x[i]);
    }
    x[n] = 12345.0f;
    return x;
}

static compute_t *cells(float *x)
{
    return (compute_t *)(void *)x;
}

static double *zeros(uint64_t n)
{
    double *x = calloc(n, sizeof *x);
    assert_non_null(x);
    return x;
}

/* |found - expected| <= roundings x unit x (|expected| + rms), element by element; frees expected
 */
static void check(const char *what, const struct device *device, const float *found,
                  double *expected, uint64_t n, enum device_dtype stored, double roundings)
{
    double rms = 0;
    for (uint64_t i = 0; i < n; i++)
        rms += expected[i] * expected[i];
    rms = fmax(sqrt(rms / (double)n), 0.1); /* inputs are about 1: what cancels has errors too */
    double unit = device->dtype == DEVICE_BF16 ? 1.0 / 256 : 2e-6;
    for (uint64_t i = 0; i < n; i++) {
        double error = fabs((double)found[i] - expected[i]);
        if (!(error <= roundings * unit * (fabs(expected[i]) + rms)))
            fail_msg("%s[%lu]: expected %.9g, found %.9g", what, i, expected[i], (double)found[i]);
        if (stored == DEVICE_BF16 && device->dtype == DEVICE_BF16) {
            uint32_t bits;
            memcpy(&bits, &found[i], sizeof bits);
            assert_int_equal(bits & 0xffff, 0);
        }
    }
    assert_true(found[n] == 12345.0f);
    free(expected);
}

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

static void rmsnorm_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    enum { R = 131 };
    for (int d = 0; d < 2; d++)
        for (uint64_t C = 5; C < 200; C = C * 3 + 2) {
            struct device *device = devices[d];
            const double eps = 1e-3;
            float *x = numbers(device, R * C, 1), *w = numbers(device, C, 1);
            float *y = numbers(device, R * C, 1), *dy = numbers(device, R * C, 1);
            float *dx = numbers(device, R * C, 1), *dw = numbers(devices[0], C, 1);
            float *again = numbers(device, R * C, 1), *rstd = numbers(device, R, 1);
            float *residual = numbers(device, R * C, 1);
            float *scratch = malloc(device_norm_scratch(DEVICE_RMSNORM, R, C) * sizeof *scratch);
            double *ey = zeros(R * C), *edx = zeros(R * C), *edw = zeros(C);
            for (uint64_t c = 0; c < C; c++)
                edw[c] = (double)dw[c];
            for (uint64_t r = 0; r < R; r++) {
                double squares = 0, dot = 0;
                for (uint64_t c = 0; c < C; c++)
                    squares += pow((double)x[r * C + c], 2);
                double s = 1 / sqrt(squares / (double)C + eps);
                for (uint64_t c = 0; c < C; c++)
                    dot += (double)dy[r * C + c] * (double)w[c] * (double)x[r * C + c];
                for (uint64_t c = 0; c < C; c++) {
                    uint64_t i = r * C + c;
                    ey[i] = (double)w[c] * (double)x[i] * s;
                    edw[c] += (double)dy[i] * (double)x[i] * s;
                    edx[i] = (double)residual[i] + s * (double)dy[i] * (double)w[c] -
                             (double)x[i] * s * s * s * dot / (double)C;
                }
            }
            device->ops->norm_forward(device, &(struct device_norm_forward){.norm = DEVICE_RMSNORM,
                                                                            .epsilon = (float)eps,
                                                                            .rows = R,
                                                                            .width = C,
                                                                            .y = cells(y),
                                                                            .rstd = rstd,
                                                                            .x = cells(x),
                                                                            .w = cells(w)});
            device->ops->norm_backward(device,
                                       &(struct device_norm_backward){.norm = DEVICE_RMSNORM,
                                                                      .dx = cells(dx),
                                                                      .dw = dw,
                                                                      .y_again = cells(again),
                                                                      .dy = cells(dy),
                                                                      .x = cells(x),
                                                                      .w = cells(w),
                                                                      .rstd = rstd,
                                                                      .residual = cells(residual),
                                                                      .scratch = scratch,
                                                                      .rows = R,
                                                                      .width = C});
            assert_memory_equal(again, y, R * C * sizeof *y);
            check("y", device, y, ey, R * C, DEVICE_BF16, 1.5);
            check("dx", device, dx, edx, R * C, DEVICE_BF16, 2);
            check("dw", device, dw, edw, C, DEVICE_F32, 2);
            float *all[] = {x, w, y, dy, dx, dw, again, rstd, residual, scratch};
            for (int i = 0; i < 10; i++)
                free(all[i]);
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

static void silu_multiply_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    enum { N = 16384 + 77 };
    for (int d = 0; d < 2; d++) {
        struct device *device = devices[d];
        float *gate = numbers(device, N, 8), *up = numbers(device, N, 2);
        float *y = numbers(device, N, 1), *dy = numbers(device, N, 1);
        float *dgate = numbers(device, N, 1), *dup = numbers(device, N, 1);
        float *again = numbers(device, N, 1);
        gate[0] = -200; /* e^200 is no f32 */
        gate[1] = 200;
        double *ey = zeros(N), *edgate = zeros(N), *edup = zeros(N);
        for (uint64_t i = 0; i < N; i++) {
            double g = (double)gate[i], s = 1 / (1 + exp(-g));
            ey[i] = g * s * (double)up[i];
            edup[i] = (double)dy[i] * g * s;
            edgate[i] = (double)dy[i] * (double)up[i] * s * (1 + g * (1 - s));
        }
        device->ops->activation_forward(
            device,
            &(struct device_activation_forward){DEVICE_SILU, N, cells(y), cells(gate), cells(up)});
        device->ops->activation_backward(
            device,
            &(struct device_activation_backward){DEVICE_SILU, N, cells(dgate), cells(dup),
                                                 cells(again), cells(dy), cells(gate), cells(up)});
        assert_memory_equal(again, y, N * sizeof *y);
        check("y", device, y, ey, N, DEVICE_BF16, 2);
        check("dgate", device, dgate, edgate, N, DEVICE_BF16, 2);
        check("dup", device, dup, edup, N, DEVICE_BF16, 2);
        float *all[] = {gate, up, y, dy, dgate, dup, again};
        for (int i = 0; i < 7; i++)
            free(all[i]);
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

/* ---- attention ---- */

struct attention_case {
    uint64_t batch, seq_len, query_heads, key_heads, head_dim;
    uint64_t document; /* tokens of a document, 0: the row is one document */
};

struct attention_twin {
    double *out, *lse, *dq, *dk, *dv;
};

/* One query of one head: everything it contributes, in f64. */
static void attend(const struct device_attention *s, uint64_t row, uint64_t head, const float *q,
                   const float *k, const float *v, const float *dout, struct attention_twin *twin)
{
    uint64_t b = row / s->seq_len, t = row % s->seq_len, D = s->head_dim;
    uint64_t kv = head / (s->query_heads / s->key_heads), from = (uint64_t)s->document_start[row];
    uint64_t at = (row * s->query_heads + head) * D;
    double *p = zeros(s->seq_len), most = -1e30, sum = 0, dot = 0;
    for (uint64_t j = from; j <= t; j++) {
        uint64_t key = ((b * s->seq_len + j) * s->key_heads + kv) * D;
        for (uint64_t i = 0; i < D; i++)
            p[j] += (double)q[at + i] * (double)k[key + i] * (double)s->scale;
        most = fmax(most, p[j]);
    }
    for (uint64_t j = from; j <= t; j++)
        sum += p[j] = exp(p[j] - most);
    twin->lse[(b * s->query_heads + head) * s->seq_len + t] = most + log(sum);
    for (uint64_t j = from; j <= t; j++) {
        uint64_t key = ((b * s->seq_len + j) * s->key_heads + kv) * D;
        p[j] /= sum;
        for (uint64_t i = 0; i < D; i++) {
            twin->out[at + i] += p[j] * (double)v[key + i];
            twin->dv[key + i] += p[j] * (double)dout[at + i];
        }
    }
    for (uint64_t i = 0; i < D; i++)
        dot += twin->out[at + i] * (double)dout[at + i];
    for (uint64_t j = from; j <= t; j++) {
        uint64_t key = ((b * s->seq_len + j) * s->key_heads + kv) * D;
        double dp = 0;
        for (uint64_t i = 0; i < D; i++)
            dp += (double)dout[at + i] * (double)v[key + i];
        double ds = p[j] * (dp - dot) * (double)s->scale;
        for (uint64_t i = 0; i < D; i++) {
            twin->dq[at + i] += ds * (double)k[key + i];
            twin->dk[key + i] += ds * (double)q[at + i];
        }
    }
    free(p);
}

static void check_attention(struct device *device, struct attention_case c)
{
    uint64_t rows = c.batch * c.seq_len, nq = rows * c.query_heads * c.head_dim;
    uint64_t nk = rows * c.key_heads * c.head_dim, nl = rows * c.query_heads;
    int32_t *start = calloc(rows, sizeof *start);
    for (uint64_t r = 0; r < rows && c.document != 0; r++)
        start[r] = (int32_t)(r % c.seq_len / c.document * c.document);
    struct device_attention shape = {c.batch,     c.seq_len,  c.query_heads,
                                     c.key_heads, c.head_dim, 1.0f / sqrtf((float)c.head_dim),
                                     start,       0,          0.0f};
    float *q = numbers(device, nq, 3), *k = numbers(device, nk, 3), *v = numbers(device, nk, 1);
    float *out = numbers(device, nq, 1), *dout = numbers(device, nq, 1);
    float *lse = numbers(device, nl, 1), *dq = numbers(device, nq, 1);
    float *dk = numbers(device, nk, 1), *dv = numbers(device, nk, 1);
    struct attention_twin twin = {zeros(nq), zeros(nl), zeros(nq), zeros(nk), zeros(nk)};
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t h = 0; h < c.query_heads; h++)
            attend(&shape, r, h, q, k, v, dout, &twin);
    void *scratch = malloc(device->ops->attention_scratch_bytes(device, shape));
    device->ops->attention_forward(device, cells(out), lse, cells(q), cells(k), cells(v), shape);
    device->ops->attention_backward(
        device,
        &(struct device_attention_backward){cells(dq), cells(dk), cells(dv), cells(dout),
                                            cells(out), lse, cells(q), cells(k), cells(v), scratch},
        shape);
    check("out", device, out, twin.out, nq, DEVICE_BF16, 1.5);
    check("lse", devices[0], lse, twin.lse, nl, DEVICE_F32, 2);
    /* D_q comes from the rounded output, and dP - D cancels */
    check("dq", device, dq, twin.dq, nq, DEVICE_BF16, 8);
    check("dk", device, dk, twin.dk, nk, DEVICE_BF16, 8);
    check("dv", device, dv, twin.dv, nk, DEVICE_BF16, 3);
    float *all[] = {q, k, v, out, dout, lse, dq, dk, dv};
    for (int i = 0; i < 9; i++)
        free(all[i]);
    free(scratch);
    free(start);
}

static void attention_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    static const struct attention_case cases[] = {
        {2, 1, 2, 1, 8, 0},    {1, 7, 1, 1, 2, 3},      {2, 51, 6, 3, 10, 17},
        {1, 128, 2, 2, 64, 0}, {1, 129, 3, 1, 6, 0},    {2, 257, 2, 1, 16, 100},
        {1, 700, 2, 2, 12, 0}, {1, 700, 2, 1, 12, 130}, {1, 600, 1, 1, 20, 5},
    };
    for (uint64_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int d = 0; d < 2; d++)
            check_attention(devices[d], cases[i]);
}

/* Poison: what the mask hides must not be read as a number. */
static void masked_keys_are_never_seen(void **state)
{
    (void)state;
    enum { T = 300, D = 8, CUT = 150 };
    struct device *device = devices[0];
    int32_t start[T];
    for (int t = 0; t < T; t++)
        start[t] = t < CUT ? 0 : CUT;
    struct device_attention shape = {1, T, 1, 1, D, 1, start, 0, 0};
    float *q = numbers(device, T * D, 1), *k = numbers(device, T * D, 1);
    float *v = numbers(device, T * D, 1), *lse = numbers(device, T, 1);
    float *one = numbers(device, T * D, 1), *two = numbers(device, T * D, 1);
    device->ops->attention_forward(device, cells(one), lse, cells(q), cells(k), cells(v), shape);
    for (int i = 0; i < CUT * D; i++) /* the first document changes; the second must not */
        k[i] = v[i] = 1000;
    device->ops->attention_forward(device, cells(two), lse, cells(q), cells(k), cells(v), shape);
    assert_memory_equal(one + CUT * D, two + CUT * D, (T - CUT) * D * sizeof *one);
    assert_true(memcmp(one, two, CUT * D * sizeof *one) != 0);
    float *all[] = {q, k, v, lse, one, two};
    for (int i = 0; i < 6; i++)
        free(all[i]);
}

static int set_up(void **state)
{
    (void)state;
    if (device_cpu_open(&devices[0], DEVICE_F32, 2) < 0 ||
        device_cpu_open(&devices[1], DEVICE_BF16, 3) < 0)
        fail_msg("%s", error_text());
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    device_close(devices[0]);
    device_close(devices[1]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_goes_in_and_out_in_both_dtypes),
        cmocka_unit_test(an_operation_counts_up_the_heartbeat),
        cmocka_unit_test(embedding_gathers_and_its_gradient_scatters),
        cmocka_unit_test(rmsnorm_and_its_gradients_match_the_twin),
        cmocka_unit_test(linear_and_its_gradients_match_the_twin),
        cmocka_unit_test(rope_rotates_and_its_backward_turns_back),
        cmocka_unit_test(silu_multiply_and_its_gradients_match_the_twin),
        cmocka_unit_test(cross_entropy_and_its_gradient_match_the_twin),
        cmocka_unit_test(attention_and_its_gradients_match_the_twin),
        cmocka_unit_test(masked_keys_are_never_seen),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
