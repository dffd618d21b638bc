/* The device's own elementary functions against libm in higher precision; rope's table against
 * transformers'. */
#pragma GCC target("avx2,fma")
#include "tests/numeric/test_layers_fixture.h"

#include "gpu_worker/device_cpu/simd.h"
#include "gpu_worker/rope_table.h"
#include "gpu_worker/scalar.h"

static float one_lane(v8 x)
{
    return _mm256_cvtss_f32(x);
}

static double ulps(float found, double expected)
{
    int exponent;
    (void)frexp(expected, &exponent);
    return fabs((double)found - expected) / ldexp(1, exponent - 24);
}

static void the_exponential_is_within_two_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (float x = -87.3f; x < 88.3f; x += 0.00173f)
        worst = fmax(worst, ulps(one_lane(v8_exp(v8_set(x))), exp((double)x)));
    print_message("exp: at most %.2f ulp\n", worst);
    assert_true(worst <= 2);
    assert_true(one_lane(v8_exp(v8_set(0))) == 1.0f);
    assert_true(one_lane(v8_exp(v8_set(-87.4f))) == 0.0f);
    assert_true(one_lane(v8_exp(v8_set(-INFINITY))) == 0.0f);
    assert_true(one_lane(v8_exp(v8_set(1000))) > 1e38f);
    assert_true(isnan(one_lane(v8_exp(v8_set(NAN)))));
}

static void the_sigmoid_is_within_three_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (float x = -80; x < 80; x += 0.00137f)
        worst = fmax(worst, ulps(one_lane(v8_sigmoid(v8_set(x))), 1 / (1 + exp(-(double)x))));
    print_message("sigmoid: at most %.2f ulp\n", worst);
    assert_true(worst <= 3);
    assert_true(isnan(one_lane(v8_sigmoid(v8_set(NAN)))));
}

static void the_hyperbolic_tangent_is_within_four_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (float x = 1e-30f; x < 30; x *= 1.0003f) {
        worst = fmax(worst, ulps(one_lane(v8_tanh(v8_set(x))), tanh((double)x)));
        assert_true(one_lane(v8_tanh(v8_set(-x))) == -one_lane(v8_tanh(v8_set(x))));
    }
    print_message("tanh: at most %.2f ulp\n", worst);
    assert_true(worst <= 4);
    assert_true(one_lane(v8_tanh(v8_set(INFINITY))) == 1.0f);
    assert_true(one_lane(v8_tanh(v8_set(-1e30f))) == -1.0f);
    assert_true(one_lane(v8_tanh(v8_set(0.0f))) == 0.0f);
    assert_true(isnan(one_lane(v8_tanh(v8_set(NAN)))));
}

static void the_normal_distribution_is_within_six_ulp(void **state)
{
    (void)state;
    double worst = 0, worst_density = 0;
    for (float x = -13.1f; x < 13.1f; x += 0.00031f) {
        struct v8_normal n = v8_normal(v8_set(x));
        double below = 0.5 * erfc(-(double)x / sqrt(2));
        double density = exp(-(double)x * (double)x / 2) * 0.5 * M_2_SQRTPI / sqrt(2);
        worst = fmax(worst, ulps(one_lane(n.below), below));
        worst_density = fmax(worst_density, ulps(one_lane(n.density), density));
    }
    print_message("Phi: at most %.2f ulp, its density %.2f\n", worst, worst_density);
    assert_true(worst <= 6 && worst_density <= 4);
    assert_true(one_lane(v8_normal(v8_set(-INFINITY)).below) == 0.0f);
    assert_true(one_lane(v8_normal(v8_set(1e30f)).below) == 1.0f);
    assert_true(isnan(one_lane(v8_normal(v8_set(NAN)).below)));
}

static float bits_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void rounding_to_bf16_is_to_nearest_even_and_keeps_nan(void **state)
{
    (void)state;
    static const uint32_t cases[][2] = {
        {0x3f800000, 0x3f800000}, {0x3f808000, 0x3f800000}, /* tie, down to even */
        {0x3f818000, 0x3f820000},                           /* tie, up to even */
        {0x3f808001, 0x3f810000}, {0x3f807fff, 0x3f800000}, {0xbf808001, 0xbf810000},
        {0x7f7fffff, 0x7f800000}, {0x7f800000, 0x7f800000}, {0x80000000, 0x80000000},
    };
    for (uint64_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float found = one_lane(v8_bf16(v8_set(bits_of(cases[i][0]))));
        float expected = bits_of(cases[i][1]);
        assert_memory_equal(&found, &expected, sizeof found);
    }
    assert_true(isnan(one_lane(v8_bf16(v8_set(bits_of(0x7fffffff))))));
    assert_true(isnan(one_lane(v8_bf16(v8_set(bits_of(0xff800001))))));
}

static void short_vectors_touch_only_their_elements(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= LANES; n++) {
        float from[LANES] = {1, 2, 3, 4, 5, 6, 7, 8}, to[LANES] = {0}, all[LANES];
        v8 x = v8_load(from, n);
        _mm256_storeu_ps(all, x);
        v8_store(to, n, v8_set(9));
        for (uint64_t i = 0; i < LANES; i++) {
            assert_true(all[i] == (i < n ? from[i] : 0.0f));
            assert_true(to[i] == (i < n ? 9.0f : 0.0f));
        }
        assert_true(v8_sum(x) == (float)(n * (n + 1) / 2));
        assert_true(v8_largest(x) == (float)n);
    }
}

static void scalar_functions_match_libm(void **state)
{
    (void)state;
    for (double x = 1e-300; x < 1e300; x *= 1.7) {
        double expected = log(x);
        assert_true(fabs(scalar_log(x) - expected) <= 4e-16 * fmax(fabs(expected), 1e-3));
    }
    for (double x = 0.5; x < 2; x += 0.0007)
        assert_true(fabs(scalar_log(x) - log(x)) <= 3e-16);
    assert_true(isinf(scalar_log(0)) && isnan(scalar_log(-1)) && isnan(scalar_log(NAN)));
    for (double x = -600; x < 600; x += 0.37)
        assert_true(fabs(scalar_exp(x) / exp(x) - 1) <= 1e-15);
    for (double x = -3e7; x < 3e7; x += 1234.56789) {
        double sine, cosine;
        scalar_sine_cosine(x, &sine, &cosine);
        assert_true(fabs(sine - sin(x)) <= 4e-16 && fabs(cosine - cos(x)) <= 4e-16);
    }
}

static void check_frequencies(struct fixture *f, const char *key, enum model_reach reach)
{
    uint64_t half = f->layout.config.rope_dim / 2;
    float *expected = fixture_floats(f, key, half), *found = fixture_memory(half * 4);
    rope_table_frequencies(&f->layout.config.rope[reach], f->layout.config.rope_dim, found);
    for (uint64_t j = 0; j < half; j++)
        assert_true(ulps(found[j], (double)expected[j]) <= 2);
    free(expected);
    free(found);
}

/* transformers takes f32 powers to about 1 ulp */
static void rope_frequencies_are_those_of_transformers(void **state)
{
    (void)state;
    static const char *const cases[] = {"llama_tied_packed", "llama_untied_packed",
                                        "phi3_untied_packed", "gemma3_tied_packed"};
    for (int i = 0; i < 4; i++) {
        struct fixture f;
        fixture_open(&f, cases[i], (struct fixture_options){DEVICE_F32, 1, FIXTURE_RECOMPUTED, 1});
        check_frequencies(&f, "inv_freq", MODEL_REACH_FULL);
        if (f.layout.config.architecture == MODEL_GEMMA3)
            check_frequencies(&f, "inv_freq_sliding", MODEL_REACH_SLIDING);
        fixture_close(&f);
    }
}

static void rope_tables_are_rounded_for_bf16(void **state)
{
    (void)state;
    float frequency[2] = {1.0f, 0.01f}, cosine[20], sine[20], rounded[20], rounded_sine[20];
    rope_table_fill(frequency, 2, 10, DEVICE_F32, cosine, sine);
    rope_table_fill(frequency, 2, 10, DEVICE_BF16, rounded, rounded_sine);
    for (uint64_t i = 0; i < 20; i++) {
        float angle = (float)(i / 2) * frequency[i % 2];
        assert_true(cosine[i] == (float)cos((double)angle) && sine[i] == (float)sin((double)angle));
        assert_true(rounded[i] == one_lane(v8_bf16(v8_set(cosine[i]))));
        assert_true(rounded_sine[i] == one_lane(v8_bf16(v8_set(sine[i]))));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_exponential_is_within_two_ulp),
        cmocka_unit_test(the_sigmoid_is_within_three_ulp),
        cmocka_unit_test(the_hyperbolic_tangent_is_within_four_ulp),
        cmocka_unit_test(the_normal_distribution_is_within_six_ulp),
        cmocka_unit_test(rounding_to_bf16_is_to_nearest_even_and_keeps_nan),
        cmocka_unit_test(short_vectors_touch_only_their_elements),
        cmocka_unit_test(scalar_functions_match_libm),
        cmocka_unit_test(rope_frequencies_are_those_of_transformers),
        cmocka_unit_test(rope_tables_are_rounded_for_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
