/*
 * AdamW: the three implementations against each other bit by bit, and all of them against torch's
 * definition computed independently in double precision.
 */
#include "opt_worker/adamw.h"
#include "opt_worker/adamw_kernel.h"
#include "opt_worker/isa.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>

enum { BLOCKS = 3, N = BLOCKS * ADAMW_BLOCK_ELEMENTS };

static const double lr = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;

struct arrays {
    float w[N], m[N], v[N];
    uint16_t hi[N], lo[N];
} __attribute__((aligned(64)));

static struct arrays in, out[ISA_COUNT];
static float gradient[N] __attribute__((aligned(64)));
static uint8_t decay_blocks[BLOCKS] = {1, 0, 1};

static uint64_t random_state;

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static double random_normal(void)
{
    double u = ((double)random_bits() + 0.5) * 0x1p-32, angle = (double)random_bits() * 0x1p-32;
    return sqrt(-2.0 * log(u)) * cos(2.0 * M_PI * angle);
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void split(float value, uint16_t *hi, uint16_t *lo)
{
    uint32_t bits = bits_of(value);
    *hi = (uint16_t)((bits + 0x8000u) >> 16);
    *lo = (uint16_t)(bits & 0xffffu);
}

static float join(uint16_t hi, uint16_t lo)
{
    return float_of((((uint32_t)hi - (lo >= 0x8000u)) << 16) | lo);
}

static struct adamw_scalars scalars_at(unsigned t, double decay, double scale)
{
    return (struct adamw_scalars){
        .lr_decay = (float)(lr * decay),
        .step_size = (float)(lr / (1.0 - pow(beta1, t))),
        .inv_sqrt_bias2 = (float)(1.0 / sqrt(1.0 - pow(beta2, t))),
        .beta1 = (float)beta1,
        .one_minus_beta1 = (float)(1.0 - beta1),
        .beta2 = (float)beta2,
        .one_minus_beta2 = (float)(1.0 - beta2),
        .eps = (float)eps,
        .scale = (float)scale,
    };
}

static struct adamw_page_f32 page_f32(const struct arrays *from, struct arrays *to)
{
    return (struct adamw_page_f32){
        .elements = N,
        .decay_blocks = decay_blocks,
        .gradient = gradient,
        .w_in = from->w,
        .m_in = from->m,
        .v_in = from->v,
        .w_out = to->w,
        .m_out = to->m,
        .v_out = to->v,
    };
}

static struct adamw_page_split page_split(const struct arrays *from, struct arrays *to)
{
    return (struct adamw_page_split){
        .elements = N,
        .decay_blocks = decay_blocks,
        .gradient = gradient,
        .w_hi_in = from->hi,
        .w_lo_in = from->lo,
        .m_in = from->m,
        .v_in = from->v,
        .w_hi_out = to->hi,
        .w_lo_out = to->lo,
        .m_out = to->m,
        .v_out = to->v,
    };
}

static void split_all(struct arrays *a)
{
    for (unsigned i = 0; i < N; i++)
        split(a->w[i], &a->hi[i], &a->lo[i]);
}

static void fill_normal(uint64_t seed)
{
    random_state = seed;
    for (unsigned i = 0; i < N; i++) {
        in.w[i] = (float)(0.02 * random_normal());
        in.m[i] = (float)(1e-3 * random_normal());
        in.v[i] = (float)fabs(1e-6 * random_normal());
        gradient[i] = (float)(1e-3 * random_normal());
    }
    split_all(&in);
}

/* Zeros of both signs, denormals, the ends of the normal range, huge values; v is not negative. */
static float special(unsigned i)
{
    static const uint32_t bits[] = {
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff,
        0x00800000, 0x80800000, 0x00800001, 0x7f7fffff, 0xff7fffff, 0x7f000000,
        0x5f000000, 0x20000000, 0x1fffffff, 0x3f800000, 0xbf800000, 0x3f7fffff,
        0x3f808000, 0x3f807fff, 0x7f800000, 0xff800000, 0x0d000000, 0x8d800000,
    };
    return float_of(bits[i % (sizeof bits / sizeof bits[0])]);
}

static void fill_special(uint64_t seed)
{
    random_state = seed;
    for (unsigned i = 0; i < N; i++) {
        in.w[i] = special(random_bits() >> 8);
        in.m[i] = special(random_bits() >> 8);
        in.v[i] = fabsf(special(random_bits() >> 8));
        gradient[i] = special(random_bits() >> 8);
    }
    split_all(&in);
}

/* Any bit pattern but NaN, whose payload is not defined. */
static float any_number(void)
{
    float value;
    do {
        value = float_of(random_bits());
    } while (isnan(value));
    return value;
}

static void fill_any(uint64_t seed)
{
    random_state = seed;
    for (unsigned i = 0; i < N; i++) {
        in.w[i] = any_number();
        in.m[i] = any_number();
        in.v[i] = fabsf(any_number());
        gradient[i] = any_number();
    }
    split_all(&in);
}

static void update_both(const struct adamw_scalars *s, enum isa isa)
{
    struct adamw_page_f32 f32 = page_f32(&in, &out[isa]);
    struct adamw_page_split halves = page_split(&in, &out[isa]);
    isa_use(isa);
    adamw_update_split(s, &halves);
    adamw_update_f32(s, &f32);
}

/* Every supported implementation against the scalar one, and split against f32. */
static void assert_all_equal(const struct adamw_scalars *s)
{
    memset(out, 0xa5, sizeof out);
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa)) {
            printf("  %s: not supported here, not compared\n", isa_name(isa));
            continue;
        }
        update_both(s, isa);
        assert_memory_equal(&out[isa], &out[ISA_SCALAR], sizeof out[0]);
    }
    for (unsigned i = 0; i < N; i++)
        assert_int_equal(bits_of(join(out[0].hi[i], out[0].lo[i])), bits_of(out[0].w[i]));
}

static void all_implementations_give_the_same_bits_for_random_values(void **state)
{
    (void)state;
    for (unsigned t = 1; t < 6; t++) {
        struct adamw_scalars s = scalars_at(t, weight_decay, 0.37);
        fill_normal(t);
        assert_all_equal(&s);
        fill_any(t);
        assert_all_equal(&s);
    }
}

static void all_implementations_give_the_same_bits_for_special_values(void **state)
{
    (void)state;
    for (unsigned t = 1; t < 6; t++) {
        struct adamw_scalars s = scalars_at(t, weight_decay, t == 1 ? 1.0 : 1e-3);
        fill_special(t);
        assert_all_equal(&s);
    }
}

static void cached_and_streamed_and_unaligned_stores_give_the_same_bits(void **state)
{
    (void)state;
    static struct arrays streamed, cached;
    static float shifted[N + 1];
    struct adamw_scalars s = scalars_at(3, weight_decay, 1.0);
    fill_normal(11);
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        isa_use(isa);
        struct adamw_page_split a = page_split(&in, &streamed), b = page_split(&in, &cached);
        struct adamw_page_f32 c = page_f32(&in, &streamed), d = page_f32(&in, &cached);
        d.w_out = shifted + 1;
        adamw_store_use(ADAMW_STORE_STREAMED);
        adamw_update_split(&s, &a);
        adamw_update_f32(&s, &c);
        adamw_update_f32(&s, &d);
        adamw_store_use(ADAMW_STORE_CACHED);
        adamw_update_split(&s, &b);
        assert_memory_equal(shifted + 1, streamed.w, sizeof streamed.w);
        d.w_out = cached.w;
        adamw_update_f32(&s, &d);
        assert_memory_equal(&streamed, &cached, sizeof cached);
    }
    adamw_store_use(ADAMW_STORE_STREAMED);
}

static void the_callers_float_mode_changes_no_bit_and_is_kept(void **state)
{
    (void)state;
    static struct arrays plain, odd;
    struct adamw_scalars s = scalars_at(2, weight_decay, 1.0);
    fill_special(5);
    unsigned saved = _mm_getcsr();
    struct adamw_page_f32 a = page_f32(&in, &plain), b = page_f32(&in, &odd);
    adamw_update_f32(&s, &a);
    _mm_setcsr(0x1f80 | _MM_ROUND_UP); /* no FTZ, no DAZ, another rounding */
    adamw_update_f32(&s, &b);
    unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    assert_int_equal(after, 0x1f80 | _MM_ROUND_UP);
    assert_memory_equal(&plain, &odd, sizeof plain);
}

static void denormals_are_zero(void **state)
{
    (void)state;
    struct adamw_scalars s = scalars_at(1, 0.0, 1.0);
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        memset(&in, 0, sizeof in);
        for (unsigned i = 0; i < N; i++) {
            gradient[i] = float_of(0x007fffff);
            in.m[i] = float_of(0x00700000);
        }
        update_both(&s, isa);
        for (unsigned i = 0; i < N; i++) {
            assert_int_equal(bits_of(out[isa].m[i]), 0);
            assert_int_equal(bits_of(out[isa].w[i]), 0);
        }
    }
}

static void absent_moments_are_zero_moments(void **state)
{
    (void)state;
    static struct arrays with, without;
    struct adamw_scalars s = scalars_at(1, weight_decay, 0.5);
    fill_normal(21);
    memset(in.m, 0, sizeof in.m);
    memset(in.v, 0, sizeof in.v);
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        isa_use(isa);
        struct adamw_page_f32 a = page_f32(&in, &with), b = page_f32(&in, &without);
        struct adamw_page_split c = page_split(&in, &with), d = page_split(&in, &without);
        b.m_in = b.v_in = d.m_in = d.v_in = NULL;
        adamw_update_f32(&s, &a);
        adamw_update_f32(&s, &b);
        adamw_update_split(&s, &c);
        adamw_update_split(&s, &d);
        assert_memory_equal(&with, &without, sizeof with);
    }
}

static void the_input_is_never_written(void **state)
{
    (void)state;
    static struct arrays before;
    static float gradient_before[N];
    struct adamw_scalars s = scalars_at(4, weight_decay, 1.0);
    fill_normal(31);
    memcpy(&before, &in, sizeof in);
    memcpy(gradient_before, gradient, sizeof gradient);
    assert_all_equal(&s);
    assert_memory_equal(&before, &in, sizeof in);
    assert_memory_equal(gradient_before, gradient, sizeof gradient);
}

static void padding_stays_zero(void **state)
{
    (void)state;
    static const struct arrays nothing;
    struct adamw_scalars s = scalars_at(1, weight_decay, 1.0);
    memset(&in, 0, sizeof in);
    memset(gradient, 0, sizeof gradient);
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        memset(&out[isa], 0xff, sizeof out[isa]);
        update_both(&s, isa);
        assert_memory_equal(&out[isa], &nothing, sizeof nothing);
    }
}

static void every_split_pattern_survives_an_update_that_moves_nothing(void **state)
{
    (void)state;
    struct adamw_scalars s = scalars_at(1, 0.0, 1.0);
    random_state = 77;
    memset(in.m, 0, sizeof in.m);
    memset(in.v, 0, sizeof in.v);
    memset(gradient, 0, sizeof gradient);
    for (unsigned high = 0; high < 65536; high += N) {
        for (unsigned i = 0; i < N; i++) {
            uint32_t bits = ((high + i) << 16) | (random_bits() & 0xffff);
            if (!isnormal(float_of(bits))) /* denormals are flushed, non-finite ones are not kept */
                bits = 0;
            in.w[i] = float_of(bits);
        }
        split_all(&in);
        for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
            if (!isa_supported(isa))
                continue;
            update_both(&s, isa);
            assert_memory_equal(out[isa].hi, in.hi, sizeof in.hi);
            assert_memory_equal(out[isa].lo, in.lo, sizeof in.lo);
        }
    }
}

/* torch.optim.AdamW (torch/optim/adamw.py, _single_tensor_adamw), in double precision. */
struct reference {
    double w[N], m[N], v[N];
};

static void reference_step(struct reference *r, unsigned t, double decay)
{
    for (unsigned i = 0; i < N; i++) {
        double g = (double)gradient[i];
        if (decay_blocks[i / ADAMW_BLOCK_ELEMENTS])
            r->w[i] *= 1.0 - lr * decay;
        r->m[i] += (g - r->m[i]) * (1.0 - beta1);
        r->v[i] = r->v[i] * beta2 + g * g * (1.0 - beta2);
        double denom = sqrt(r->v[i]) / sqrt(1.0 - pow(beta2, t)) + eps;
        r->w[i] -= lr / (1.0 - pow(beta1, t)) * (r->m[i] / denom);
    }
}

static double relative_l2(const double *want, const float *got)
{
    double difference = 0.0, norm = 0.0;
    for (unsigned i = 0; i < N; i++) {
        difference += (want[i] - (double)got[i]) * (want[i] - (double)got[i]);
        norm += want[i] * want[i];
    }
    return sqrt(difference / norm);
}

static double moved(const float *from, const float *to)
{
    double distance = 0.0;
    for (unsigned i = 0; i < N; i++)
        distance = fmax(distance, fabs((double)from[i] - (double)to[i]));
    return distance;
}

/* 1 and 100 updates with fresh gradients each, from zero moments. */
static void assert_equals_torch(unsigned steps, double decay, enum isa isa)
{
    static struct reference r;
    static struct arrays a, b;
    isa_use(isa);
    fill_normal(41);
    memset(in.m, 0, sizeof in.m);
    memset(in.v, 0, sizeof in.v);
    memcpy(&a, &in, sizeof in);
    for (unsigned i = 0; i < N; i++) {
        r.w[i] = (double)in.w[i];
        r.m[i] = r.v[i] = 0.0;
    }
    for (unsigned t = 1; t <= steps; t++) {
        for (unsigned i = 0; i < N; i++)
            gradient[i] = (float)(1e-3 * random_normal());
        struct adamw_scalars s = scalars_at(t, decay, 1.0);
        struct adamw_page_f32 page = page_f32(&a, &b);
        adamw_update_f32(&s, &page);
        memcpy(&a, &b, sizeof a);
        reference_step(&r, t, decay);
    }
    assert_true(moved(in.w, a.w) > 0.5 * lr);
    assert_true(relative_l2(r.w, a.w) < 1e-6);
    assert_true(relative_l2(r.m, a.m) < 1e-6);
    assert_true(relative_l2(r.v, a.v) < 1e-6);
}

static void one_and_a_hundred_steps_equal_torch_with_decay_on_and_off(void **state)
{
    (void)state;
    for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
        if (!isa_supported(isa))
            continue;
        assert_equals_torch(1, 0.0, isa);
        assert_equals_torch(1, weight_decay, isa);
        assert_equals_torch(100, 0.0, isa);
        assert_equals_torch(100, weight_decay, isa);
    }
}

/* L2 regularisation would put the decay into m and v: with a zero gradient m would not stay zero.
 */
static void decay_is_decoupled_and_exempt_blocks_do_not_decay(void **state)
{
    (void)state;
    struct adamw_scalars s = scalars_at(1, weight_decay, 1.0);
    fill_normal(51);
    memset(in.m, 0, sizeof in.m);
    memset(in.v, 0, sizeof in.v);
    memset(gradient, 0, sizeof gradient);
    assert_all_equal(&s);
    for (unsigned i = 0; i < N; i++) {
        int decays = decay_blocks[i / ADAMW_BLOCK_ELEMENTS];
        float want = decays ? in.w[i] - s.lr_decay * in.w[i] : in.w[i];
        assert_int_equal(bits_of(out[0].w[i]), bits_of(want));
        assert_int_equal(bits_of(out[0].m[i]), 0);
    }
}

static void clipping_scales_the_gradient_before_the_moments(void **state)
{
    (void)state;
    static struct arrays scaled;
    fill_normal(61);
    struct adamw_scalars s = scalars_at(2, weight_decay, 0.25); /* a power of two: exact */
    isa_use(ISA_SCALAR);
    struct adamw_page_f32 page = page_f32(&in, &scaled);
    adamw_update_f32(&s, &page);
    for (unsigned i = 0; i < N; i++)
        gradient[i] *= 0.25f;
    s.scale = 1.0f;
    page = page_f32(&in, &out[0]);
    adamw_update_f32(&s, &page);
    assert_memory_equal(scaled.w, out[0].w, sizeof scaled.w);
    assert_memory_equal(scaled.v, out[0].v, sizeof scaled.v);
}

/* A pure bf16 weight of 1.0 would stay 1.0: half its ulp is 2e-3, the step 6e-4. */
static void a_split_weight_of_one_moves_as_in_f32(void **state)
{
    (void)state;
    static struct arrays a, b;
    memset(&a, 0, sizeof a);
    for (unsigned i = 0; i < N; i++) {
        a.w[i] = 1.0f;
        gradient[i] = 0.01f;
    }
    split_all(&a);
    for (unsigned t = 1; t <= 100; t++) {
        struct adamw_scalars s = scalars_at(t, 0.0, 1.0);
        s.step_size = (float)(6e-4 / (1.0 - pow(beta1, t)));
        struct adamw_page_split halves = page_split(&a, &b);
        struct adamw_page_f32 f32 = page_f32(&a, &b);
        adamw_update_split(&s, &halves);
        adamw_update_f32(&s, &f32);
        memcpy(&a, &b, sizeof a);
    }
    for (unsigned i = 0; i < N; i++) {
        assert_int_equal(bits_of(join(a.hi[i], a.lo[i])), bits_of(a.w[i]));
        assert_true(fabs((double)a.w[i] - (1.0 - 100 * 6e-4)) < 1e-4);
        assert_int_not_equal(a.hi[i], 0x3f80);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_implementations_give_the_same_bits_for_random_values),
        cmocka_unit_test(all_implementations_give_the_same_bits_for_special_values),
        cmocka_unit_test(cached_and_streamed_and_unaligned_stores_give_the_same_bits),
        cmocka_unit_test(the_callers_float_mode_changes_no_bit_and_is_kept),
        cmocka_unit_test(denormals_are_zero),
        cmocka_unit_test(absent_moments_are_zero_moments),
        cmocka_unit_test(the_input_is_never_written),
        cmocka_unit_test(padding_stays_zero),
        cmocka_unit_test(every_split_pattern_survives_an_update_that_moves_nothing),
        cmocka_unit_test(one_and_a_hundred_steps_equal_torch_with_decay_on_and_off),
        cmocka_unit_test(decay_is_decoupled_and_exempt_blocks_do_not_decay),
        cmocka_unit_test(clipping_scales_the_gradient_before_the_moments),
        cmocka_unit_test(a_split_weight_of_one_moves_as_in_f32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
