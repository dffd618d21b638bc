/* Attention against a plain twin in f64: documents, windows, soft-capped scores, decoding. */
#include "tests/numeric/test_device_fixture.h"

struct attention_case {
    uint64_t batch, seq_len, query_heads, key_heads, head_dim;
    uint64_t document; /* tokens of a document, 0: the row is one document */
    uint64_t window;
    float softcap;
};

struct attention_twin {
    double *out, *lse, *dq, *dk, *dv;
};

static uint64_t first_key(const struct device_attention *s, uint64_t row)
{
    uint64_t t = row % s->seq_len, from = (uint64_t)s->document_start[row];
    return s->window != 0 && t >= from + s->window ? t - s->window + 1 : from;
}

/* One query of one head: everything it contributes, in f64. */
static void attend(const struct device_attention *s, uint64_t row, uint64_t head, const float *q,
                   const float *k, const float *v, const float *dout, struct attention_twin *twin)
{
    uint64_t b = row / s->seq_len, t = row % s->seq_len, D = s->head_dim;
    uint64_t kv = head / (s->query_heads / s->key_heads), from = first_key(s, row);
    uint64_t at = (row * s->query_heads + head) * D;
    double *p = zeros(s->seq_len), *slope = zeros(s->seq_len);
    double most = -1e30, sum = 1e-300, dot = 0; /* 1e-300: a sum whose logarithm exists */
    for (uint64_t j = from; j <= t; j++) {
        uint64_t key = ((b * s->seq_len + j) * s->key_heads + kv) * D;
        for (uint64_t i = 0; i < D; i++)
            p[j] += (double)q[at + i] * (double)k[key + i] * (double)s->scale;
        double t_capped = s->softcap == 0.0f ? 0 : tanh(p[j] / (double)s->softcap);
        slope[j] = 1 - t_capped * t_capped;
        if (s->softcap != 0.0f)
            p[j] = (double)s->softcap * t_capped;
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
        double ds = p[j] * (dp - dot) * slope[j] * (double)s->scale;
        for (uint64_t i = 0; i < D; i++) {
            twin->dq[at + i] += ds * (double)k[key + i];
            twin->dk[key + i] += ds * (double)q[at + i];
        }
    }
    free(p);
    free(slope);
}

static void check_attention(int d, struct attention_case c)
{
    struct device *device = devices[d];
    uint64_t rows = c.batch * c.seq_len, nq = rows * c.query_heads * c.head_dim;
    uint64_t nk = rows * c.key_heads * c.head_dim, nl = rows * c.query_heads;
    int32_t *start = calloc(rows, sizeof *start);
    for (uint64_t r = 0; r < rows && c.document != 0; r++)
        start[r] = (int32_t)(r % c.seq_len / c.document * c.document);
    struct device_attention shape = {c.batch,     c.seq_len,  c.query_heads,
                                     c.key_heads, c.head_dim, 1.0f / sqrtf((float)c.head_dim),
                                     start,       c.window,   c.softcap};
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
    float *again[] = {floats(nq), floats(nl), floats(nq), floats(nk), floats(nk)};
    device = alone[d];
    device->ops->attention_forward(device, cells(again[0]), again[1], cells(q), cells(k), cells(v),
                                   shape);
    device->ops->attention_backward(
        device,
        &(struct device_attention_backward){cells(again[2]), cells(again[3]), cells(again[4]),
                                            cells(dout), cells(out), lse, cells(q), cells(k),
                                            cells(v), scratch},
        shape);
    check_same("out", out, again[0], nq);
    check_same("lse", lse, again[1], nl);
    check_same("dq", dq, again[2], nq);
    check_same("dk", dk, again[3], nk);
    check_same("dv", dv, again[4], nk);
    double capped = c.softcap == 0.0f ? 1 : 3; /* a cap adds the errors of a tanh to each score */
    check("out", devices[d], out, twin.out, nq, DEVICE_BF16, 3 * capped);
    check("lse", devices[0], lse, twin.lse, nl, DEVICE_F32, 2 * capped);
    /* D_q comes from the rounded output, and dP - D cancels; each query head's share of dk and dv
     * is rounded before they are added */
    double share = c.query_heads == c.key_heads ? 1 : 2;
    check("dq", devices[d], dq, twin.dq, nq, DEVICE_BF16, 16 * capped);
    check("dk", devices[d], dk, twin.dk, nk, DEVICE_BF16, 16 * share * capped);
    check("dv", devices[d], dv, twin.dv, nk, DEVICE_BF16, 4 * share * capped);
    float *all[] = {q, k, v, out, dout, lse, dq, dk, dv};
    for (int i = 0; i < 9; i++)
        free(all[i]);
    free(scratch);
    free(start);
}

static void check_cases(const struct attention_case *cases, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        for (int d = 0; d < 2; d++)
            check_attention(d, cases[i]);
}

static void attention_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    static const struct attention_case cases[] = {
        {2, 1, 2, 1, 8, 0, 0, 0},    {1, 7, 1, 1, 2, 3, 0, 0},      {2, 51, 6, 3, 10, 17, 0, 0},
        {1, 128, 2, 2, 64, 0, 0, 0}, {1, 129, 3, 1, 6, 0, 0, 0},    {2, 257, 2, 1, 16, 100, 0, 0},
        {1, 700, 2, 2, 12, 0, 0, 0}, {1, 700, 2, 1, 12, 130, 0, 0}, {1, 600, 1, 1, 20, 5, 0, 0},
    };
    check_cases(cases, sizeof cases / sizeof cases[0]);
}

/* Of one key, within a tile, at its edges, over several tiles, longer than the row; with documents
 * that end inside of it. */
static void a_window_hides_what_lies_further_back(void **state)
{
    (void)state;
    static const struct attention_case cases[] = {
        {1, 40, 2, 1, 8, 0, 1, 0},      {2, 51, 6, 3, 10, 17, 7, 0},
        {1, 300, 2, 2, 12, 0, 128, 0},  {1, 300, 2, 1, 6, 0, 129, 0},
        {1, 700, 2, 1, 12, 0, 3, 0},    {1, 700, 2, 2, 12, 0, 255, 0},
        {1, 700, 1, 1, 8, 130, 60, 0},  {1, 700, 1, 1, 8, 0, 5000, 0},
        {2, 400, 2, 1, 8, 300, 257, 0}, {1, 600, 1, 1, 8, 0, 130, 0},
    };
    check_cases(cases, sizeof cases / sizeof cases[0]);
}

static void soft_capped_scores_match_the_twin(void **state)
{
    (void)state;
    static const struct attention_case cases[] = {
        {1, 51, 2, 1, 8, 0, 0, 2.0f},
        {2, 130, 4, 2, 10, 50, 0, 50.0f},
        {1, 400, 2, 1, 256, 0, 100, 5.0f},
        {1, 1, 1, 1, 6, 0, 4, 1.0f},
    };
    check_cases(cases, sizeof cases / sizeof cases[0]);
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

/* Not a number in a key or value that lies whole tiles outside of the window: 0 times it would be
 * seen, so those tiles were not touched. */
static void tiles_outside_the_window_are_skipped(void **state)
{
    (void)state;
    enum { T = 900, D = 8, WINDOW = 50, POISONED = 200, CLEAN = 640 };
    struct device *device = devices[0];
    int32_t start[T] = {0};
    struct device_attention shape = {1, T, 1, 1, D, 1, start, WINDOW, 0};
    float *q = numbers(device, T * D, 1), *k = numbers(device, T * D, 1);
    float *v = numbers(device, T * D, 1), *dout = numbers(device, T * D, 1);
    float *lse = floats(T), *out = floats(T * D), *dq = floats(T * D), *dk = floats(T * D);
    float *dv = floats(T * D);
    for (int i = 0; i < POISONED * D; i++)
        k[i] = v[i] = NAN;
    void *scratch = malloc(device->ops->attention_scratch_bytes(device, shape));
    device->ops->attention_forward(device, cells(out), lse, cells(q), cells(k), cells(v), shape);
    device->ops->attention_backward(
        device,
        &(struct device_attention_backward){cells(dq), cells(dk), cells(dv), cells(dout),
                                            cells(out), lse, cells(q), cells(k), cells(v), scratch},
        shape);
    assert_true(isnan(out[0]) && isnan(dq[0]));
    for (int i = CLEAN * D; i < T * D; i++)
        assert_true(isfinite(out[i]) && isfinite(dq[i]) && isfinite(dk[i]) && isfinite(dv[i]));
    float *all[] = {q, k, v, dout, lse, out, dq, dk, dv};
    for (int i = 0; i < 9; i++)
        free(all[i]);
    free(scratch);
}

/* Row r of a microbatch, decoded from a cache that holds the rows before it. */
static void check_decoding(int d, uint64_t window, float softcap)
{
    enum { T = 70, SEQUENCES = 2, CONTEXT = 80, HQ = 4, HK = 2, D = 10, Q = HQ * D, K = HK * D };
    struct device *device = devices[d];
    int32_t start[T * SEQUENCES] = {0}, sequence[T * SEQUENCES], position[T * SEQUENCES];
    uint64_t rows = (uint64_t)T * SEQUENCES;
    float *q = numbers(device, rows * Q, 3), *k = numbers(device, rows * K, 3);
    float *v = numbers(device, rows * K, 1), *out = floats(rows * Q), *again = floats(rows * Q);
    float *cache_k = floats(SEQUENCES * CONTEXT * K), *cache_v = floats(SEQUENCES * CONTEXT * K);
    struct attention_twin twin = {zeros(rows * Q), zeros(rows * HQ), zeros(rows * Q),
                                  zeros(rows * K), zeros(rows * K)};
    struct device_attention shape = {SEQUENCES, T, HQ, HK, D, 0.3f, start, window, softcap};
    for (uint64_t r = 0; r < rows; r++) {
        sequence[r] = (int32_t)(r / T);
        position[r] = (int32_t)(r % T);
        for (uint64_t h = 0; h < HQ; h++)
            attend(&shape, r, h, q, k, v, q, &twin);
    }
    struct device_decode decode = {rows, CONTEXT,  HQ,       HK,     D,
                                   0.3f, sequence, position, window, softcap};
    struct device_decode_arrays arrays = {cells(out), cells(cache_k), cells(cache_v),
                                          cells(q),   cells(k),       cells(v)};
    device->ops->attention_decode(device, &arrays, decode);
    arrays.out = cells(again);
    alone[d]->ops->attention_decode(alone[d], &arrays, decode);
    check_same("decoded", out, again, rows * Q);
    check("decoded", device, out, twin.out, rows * Q, DEVICE_BF16, 6);
    double *unused[] = {twin.lse, twin.dq, twin.dk, twin.dv};
    for (int i = 0; i < 4; i++)
        free(unused[i]);
    float *all[] = {q, k, v, out, cache_k, cache_v};
    for (int i = 0; i < 6; i++)
        free(all[i]);
}

static void decoding_sees_what_the_whole_sequence_sees(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        check_decoding(d, 0, 0);
        check_decoding(d, 1, 0);
        check_decoding(d, 13, 0);
        check_decoding(d, 13, 1.5f);
        check_decoding(d, 0, 30.0f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_and_its_gradients_match_the_twin),
        cmocka_unit_test(a_window_hides_what_lies_further_back),
        cmocka_unit_test(soft_capped_scores_match_the_twin),
        cmocka_unit_test(masked_keys_are_never_seen),
        cmocka_unit_test(tiles_outside_the_window_are_skipped),
        cmocka_unit_test(decoding_sees_what_the_whole_sequence_sees),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
