/* Counter-based random numbers: published vectors, independence of cutting, distribution. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "model/layout.h"
#include "model/random.h"
#include "model/weights.h"
#include "procs/error.h"

enum { N = 100000 };

static float a[N], b[N];

static void philox_gives_the_published_vectors(void **state)
{
    (void)state;
    const struct {
        uint32_t counter[4], key[2], out[4];
    } vectors[] = {
        /* Random123, kat_vectors: philox4x32 10 */
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        random_philox(vectors[i].counter, vectors[i].key, out);
        assert_memory_equal(out, vectors[i].out, sizeof out);
    }
}

static void an_element_does_not_depend_on_how_the_stream_is_cut(void **state)
{
    (void)state;
    struct random_key key = {.seed = 7, .purpose = RANDOM_TEST, .layer = 3};
    uint64_t start = ((uint64_t)5 << 32) - 501; /* across a carry of the counter's low word x 4 */
    random_normal_fill(key, start, 1000, a, 0.02f);
    for (uint64_t i = 0, n = 1; i < 1000; i += n, n = n % 13 + 1)
        random_normal_fill(key, start + i, i + n <= 1000 ? n : 1000 - i, &b[i], 0.02f);
    assert_memory_equal(a, b, 1000 * sizeof a[0]);
    uint32_t bits[8], one;
    random_bits_fill(key, 2, 8, bits);
    for (uint64_t i = 0; i < 8; i++) {
        random_bits_fill(key, 2 + i, 1, &one);
        assert_int_equal(one, bits[i]);
        assert_true(random_uniform(key, 2 + i) == ((double)one + 0.5) / 4294967296.0);
    }
}

static void each_part_of_the_key_names_another_stream(void **state)
{
    (void)state;
    const struct random_key keys[] = {
        {.seed = 1, .purpose = 1, .step = 1, .layer = 1},
        {.seed = 2, .purpose = 1, .step = 1, .layer = 1},
        {.seed = 1 | (uint64_t)1 << 32, .purpose = 1, .step = 1, .layer = 1},
        {.seed = 1, .purpose = 2, .step = 1, .layer = 1},
        {.seed = 1, .purpose = 1, .step = 2, .layer = 1},
        {.seed = 1, .purpose = 1, .step = 1 | (uint64_t)1 << 32, .layer = 1},
        {.seed = 1, .purpose = 1, .step = 1, .layer = 2},
    };
    uint32_t bits[7][8];
    for (int i = 0; i < 7; i++)
        random_bits_fill(keys[i], 0, 8, bits[i]);
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < i; j++)
            for (int k = 0; k < 8; k++)
                assert_int_not_equal(bits[i][k], bits[j][k]);
}

/* Phi(x) of the C library is the oracle; near 0 and 1 compare relative to the smaller tail. */
static void the_quantile_inverts_the_normal_distribution(void **state)
{
    (void)state;
    for (int i = 1; i < 20000; i++) {
        double p = i < 10000 ? pow(10.0, -i / 1000.0) / 2 : (i - 9999.5) / 10001.0;
        double x = random_normal_quantile(p);
        double back = 0.5 * erfc(-x * 0.70710678118654752440);
        if (fabs(back - p) > 1e-13 * p)
            fail_msg("p %.17g: quantile %.17g, back %.17g", p, x, back);
        if (p > 1e-6 && 1.0 - (1.0 - p) == p)
            assert_true(fabs(random_normal_quantile(1.0 - p) + x) < 1e-9);
    }
    assert_true(random_normal_quantile(0.5) == 0.0);
    double far = random_normal_quantile(0x1p-33); /* the most extreme number that is drawn */
    assert_true(far < -6.33 && far > -6.35);
}

static void normal_numbers_have_the_moments_of_the_normal(void **state)
{
    (void)state;
    struct random_key key = {.seed = 1, .purpose = RANDOM_TEST};
    random_normal_fill(key, 0, N, a, 1.0f);
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0, lag = 0;
    for (int i = 0; i < N; i++) {
        double x = a[i];
        m1 += x, m2 += x * x, m3 += x * x * x, m4 += x * x * x * x;
        lag += x * (double)a[(i + 1) % N];
    }
    /* five standard errors: 1, sqrt 2, sqrt 15, sqrt 96 over sqrt N */
    assert_true(fabs(m1 / N) < 0.016);
    assert_true(fabs(m2 / N - 1) < 0.0224);
    assert_true(fabs(m3 / N) < 0.062);
    assert_true(fabs(m4 / N - 3) < 0.155);
    assert_true(fabs(lag / N) < 0.016);
}

/* The bits are part of every run's result: they may never change. */
static void the_bits_are_those_of_the_first_release(void **state)
{
    (void)state;
    struct random_key key = {.seed = 42, .purpose = RANDOM_INIT_WEIGHTS, .layer = 1};
    float x[4];
    uint32_t bits[4];
    random_normal_fill(key, 4096, 4, x, 0.02f);
    memcpy(bits, x, sizeof bits);
    const uint32_t expected[4] = {0x3d57b24f, 0x3c55a31e, 0x3cc2a718, 0xbc8ed83f};
    for (int i = 0; i < 4; i++)
        if (bits[i] != expected[i])
            fail_msg("found 0x%08x, 0x%08x, 0x%08x, 0x%08x", bits[0], bits[1], bits[2], bits[3]);
}

static void a_permutation_hits_every_index_once(void **state)
{
    (void)state;
    static uint8_t seen[5000];
    for (uint64_t n = 1; n <= 5000; n = n < 70 ? n + 1 : n * 3 + 1) {
        for (uint64_t epoch = 0; epoch < 2; epoch++) {
            memset(seen, 0, sizeof seen);
            for (uint64_t i = 0; i < n; i++) {
                uint64_t to = random_permute(9, epoch, n, i);
                assert_true(to < n);
                assert_false(seen[to]);
                seen[to] = 1;
            }
        }
    }
}

static void permutations_differ_by_epoch_and_move_nearly_all(void **state)
{
    (void)state;
    int fixed = 0, same = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        fixed += random_permute(9, 0, 1000, i) == i;
        same += random_permute(9, 0, 1000, i) == random_permute(9, 1, 1000, i);
    }
    assert_true(fixed < 10 && same < 10);
    assert_true(random_permute(9, 0, (uint64_t)1 << 62, 12345) < (uint64_t)1 << 62);
}

/* Where index 0 goes over many epochs: each of 6 places, within five standard errors. */
static void small_permutations_are_not_biased(void **state)
{
    (void)state;
    int count[6] = {0};
    for (uint64_t epoch = 0; epoch < 6000; epoch++)
        count[random_permute(1, epoch, 6, 0)]++;
    for (int i = 0; i < 6; i++)
        assert_in_range(count[i], 1000 - 145, 1000 + 145);
}

static void random_weights_do_not_depend_on_pages(void **state)
{
    (void)state;
    const char *json = "{\"model_type\": \"llama\", \"vocab_size\": 130, \"hidden_size\": 64, "
                       "\"intermediate_size\": 96, \"num_hidden_layers\": 2, "
                       "\"num_attention_heads\": 4, \"initializer_range\": 0.5}";
    struct model_config config;
    struct model_layout small, large;
    assert_int_equal(model_config_parse(&config, json, strlen(json), "x"), 0);
    assert_int_equal(model_layout_init(&small, &config, 4096), 0);
    assert_int_equal(model_layout_init(&large, &config, 1 << 20), 0);
    const char *name = "model.layers.1.mlp.up_proj.weight";
    model_init_random(&small, model_layout_find(&small, name), 3, 0, 6144, a);
    model_init_random(&large, model_layout_find(&large, name), 3, 0, 1001, b);
    model_init_random(&large, model_layout_find(&large, name), 3, 1001, 6144 - 1001, &b[1001]);
    assert_memory_equal(a, b, 6144 * sizeof a[0]);
    double squares = 0;
    for (int i = 0; i < 6144; i++)
        squares += (double)a[i] * (double)a[i];
    assert_true(fabs(sqrt(squares / 6144) - 0.5) < 0.03);
    model_init_random(&small, model_layout_find(&small, "model.norm.weight"), 3, 0, 64, a);
    for (int i = 0; i < 64; i++)
        assert_true(a[i] == 1.0f);
    model_layout_destroy(&small);
    model_layout_destroy(&large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_vectors),
        cmocka_unit_test(an_element_does_not_depend_on_how_the_stream_is_cut),
        cmocka_unit_test(each_part_of_the_key_names_another_stream),
        cmocka_unit_test(the_quantile_inverts_the_normal_distribution),
        cmocka_unit_test(normal_numbers_have_the_moments_of_the_normal),
        cmocka_unit_test(the_bits_are_those_of_the_first_release),
        cmocka_unit_test(a_permutation_hits_every_index_once),
        cmocka_unit_test(permutations_differ_by_epoch_and_move_nearly_all),
        cmocka_unit_test(small_permutations_are_not_biased),
        cmocka_unit_test(random_weights_do_not_depend_on_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
