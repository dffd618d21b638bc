/* Attention against a plain twin in f64: documents, windows, soft-capped scores, decoding. */
#include "tests/numeric/test_device_fixture.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_and_its_gradients_match_the_twin),
        cmocka_unit_test(masked_keys_are_never_seen),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
