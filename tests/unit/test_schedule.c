/*
 * The schedule against values of transformers' and torch's formulas, computed once by
 *
 *     import math, struct
 *     def factor(type, k, S, w, r, D):            # transformers.optimization, k = current_step
 *         if k < w: return (k + 1) / w            # (there: k / w)
 *         p = (k - w) / max(1, S - w)
 *         if type == "constant": return 1.0
 *         if type == "linear": return (S - k) / max(1, S - w) * (1 - r) + r
 *         if type == "cosine":
 *             return max(0, 0.5 * (1 + math.cos(math.pi * 0.5 * 2.0 * p)) * (1 - r) + r)
 *         if k < S - D: return 1.0                # get_wsd_schedule, decay_type="linear"
 *         return max(0, (1 - (k - w - (S - D - w)) / D) * (1 - r) + r)
 *     for type in ("constant", "linear", "cosine", "wsd"):
 *         for k in (0, 1, 29, 30, 31, 500, 899, 900, 950, 999):
 *             print(type, k + 1, repr(3e-4 * factor(type, k, 1000, 30, 0.1, 100)))
 *     f32 = lambda x: struct.unpack("f", struct.pack("f", x))[0]
 *     b1, b2, eps, wd = 0.9, 0.95, 1e-8, 0.1
 *     for step, t in ((1, 1), (30, 29), (31, 30), (999, 997)):
 *         lr = 3e-4 * factor("cosine", step - 1, 1000, 30, 0.1, 100)
 *         print(step, t, *(float.hex(f32(x)) for x in (
 *             lr, lr * wd, 1 - lr * wd, lr / (1 - b1 ** t), 1 / math.sqrt(1 - b2 ** t),
 *             b1, b2, 1 - b1, 1 - b2, eps)))
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "launcher/config.h"
#include "launcher/schedule.h"

static const struct schedule base = {
    .type = SCHEDULE_COSINE,
    .steps = 1000,
    .warmup_steps = 30,
    .learning_rate = 3e-4,
    .min_lr_ratio = 0.1,
    .decay_ratio = 0.1,
    .beta1 = 0.9,
    .beta2 = 0.95,
    .eps = 1e-8,
    .weight_decay = 0.1,
};

static const struct rate {
    enum schedule_type type;
    uint64_t step;
    double rate;
} rates[] = {
    {SCHEDULE_CONSTANT, 1, 9.999999999999999e-06},
    {SCHEDULE_CONSTANT, 2, 1.9999999999999998e-05},
    {SCHEDULE_CONSTANT, 30, 0.0003},
    {SCHEDULE_CONSTANT, 31, 0.0003},
    {SCHEDULE_CONSTANT, 32, 0.0003},
    {SCHEDULE_CONSTANT, 501, 0.0003},
    {SCHEDULE_CONSTANT, 900, 0.0003},
    {SCHEDULE_CONSTANT, 901, 0.0003},
    {SCHEDULE_CONSTANT, 951, 0.0003},
    {SCHEDULE_CONSTANT, 1000, 0.0003},
    {SCHEDULE_LINEAR, 1, 9.999999999999999e-06},
    {SCHEDULE_LINEAR, 2, 1.9999999999999998e-05},
    {SCHEDULE_LINEAR, 30, 0.0003},
    {SCHEDULE_LINEAR, 31, 0.0003},
    {SCHEDULE_LINEAR, 32, 0.00029972164948453606},
    {SCHEDULE_LINEAR, 501, 0.00016917525773195875},
    {SCHEDULE_LINEAR, 900, 5.811340206185567e-05},
    {SCHEDULE_LINEAR, 901, 5.783505154639175e-05},
    {SCHEDULE_LINEAR, 951, 4.3917525773195875e-05},
    {SCHEDULE_LINEAR, 1000, 3.0278350515463917e-05},
    {SCHEDULE_COSINE, 1, 9.999999999999999e-06},
    {SCHEDULE_COSINE, 2, 1.9999999999999998e-05},
    {SCHEDULE_COSINE, 30, 0.0003},
    {SCHEDULE_COSINE, 31, 0.0003},
    {SCHEDULE_COSINE, 32, 0.0002999992919569404},
    {SCHEDULE_COSINE, 501, 0.0001715558999854505},
    {SCHEDULE_COSINE, 900, 3.7158577698444975e-05},
    {SCHEDULE_COSINE, 901, 3.701876070590349e-05},
    {SCHEDULE_COSINE, 951, 3.176624432092475e-05},
    {SCHEDULE_COSINE, 1000, 3.0000708043059558e-05},
    {SCHEDULE_WSD, 1, 9.999999999999999e-06},
    {SCHEDULE_WSD, 2, 1.9999999999999998e-05},
    {SCHEDULE_WSD, 30, 0.0003},
    {SCHEDULE_WSD, 31, 0.0003},
    {SCHEDULE_WSD, 32, 0.0003},
    {SCHEDULE_WSD, 501, 0.0003},
    {SCHEDULE_WSD, 900, 0.0003},
    {SCHEDULE_WSD, 901, 0.0003},
    {SCHEDULE_WSD, 951, 0.000165},
    {SCHEDULE_WSD, 1000, 3.27e-05},
};

static const struct {
    uint64_t step, t;
    struct schedule_scalars scalars;
} updates[] = {
    {1,
     1,
     {0x1.4f8b58p-17f, 0x1.0c6f7ap-20f, 0x1.ffffdep-1f, 0x1.a36e2ep-14f, 0x1.1e377ap+2f,
      0x1.ccccccp-1f, 0x1.e66666p-1f, 0x1.99999ap-4f, 0x1.99999ap-5f, 0x1.5798eep-27f}},
    {30,
     29,
     {0x1.3a92a4p-12f, 0x1.f75104p-16f, 0x1.fffc12p-1f, 0x1.4a1f3ap-12f, 0x1.22f8dep+0f,
      0x1.ccccccp-1f, 0x1.e66666p-1f, 0x1.99999ap-4f, 0x1.99999ap-5f, 0x1.5798eep-27f}},
    {31,
     30,
     {0x1.3a92a4p-12f, 0x1.f75104p-16f, 0x1.fffc12p-1f, 0x1.487f8cp-12f, 0x1.20df32p+0f,
      0x1.ccccccp-1f, 0x1.e66666p-1f, 0x1.99999ap-4f, 0x1.99999ap-5f, 0x1.5798eep-27f}},
    {999,
     997,
     {0x1.f75d2ep-16f, 0x1.92b0f2p-19f, 0x1.ffff9cp-1f, 0x1.f75d2ep-16f, 0x1.000000p+0f,
      0x1.ccccccp-1f, 0x1.e66666p-1f, 0x1.99999ap-4f, 0x1.99999ap-5f, 0x1.5798eep-27f}},
};

static void assert_close(double found, double expected)
{
    if (!(fabs(found - expected) <= 1e-14 * fabs(expected)))
        fail_msg("expected %.17g, found %.17g", expected, found);
}

static void rates_are_those_of_transformers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        struct schedule schedule = base;
        schedule.type = rates[i].type;
        assert_close(schedule_learning_rate(&schedule, rates[i].step), rates[i].rate);
    }
}

static void scalars_are_those_of_torch_rounded_once(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof updates / sizeof *updates; i++) {
        struct schedule_scalars found = schedule_adamw(&base, updates[i].step, updates[i].t);
        assert_memory_equal(&found, &updates[i].scalars, sizeof found);
    }
}

static void a_constant_rate_does_not_know_the_length(void **state)
{
    (void)state;
    struct schedule a = base, b = base;
    a.type = b.type = SCHEDULE_CONSTANT;
    b.steps = 777777;
    for (uint64_t step = 1; step <= 1000; step++)
        assert_true(schedule_learning_rate(&a, step) == schedule_learning_rate(&b, step));
}

static void no_rate_is_negative_or_above_the_rate_asked_for(void **state)
{
    (void)state;
    for (int type = SCHEDULE_CONSTANT; type <= SCHEDULE_WSD; type++) {
        for (uint64_t warmup = 0; warmup <= 12; warmup++) {
            struct schedule s = base;
            s.type = (enum schedule_type)type;
            s.steps = 10;
            s.warmup_steps = warmup;
            s.min_lr_ratio = 0.0;
            for (uint64_t step = 1; step <= 15; step++) {
                double rate = schedule_learning_rate(&s, step);
                assert_true(rate >= 0.0 && rate <= s.learning_rate);
            }
        }
    }
}

static void a_run_without_warmup_starts_at_the_full_rate(void **state)
{
    (void)state;
    for (int type = SCHEDULE_CONSTANT; type <= SCHEDULE_WSD; type++) {
        struct schedule s = base;
        s.type = (enum schedule_type)type;
        s.warmup_steps = 0;
        assert_true(schedule_learning_rate(&s, 1) == s.learning_rate);
    }
}

static void wsd_without_decay_is_constant_and_with_all_of_it_linear(void **state)
{
    (void)state;
    struct schedule wsd = base, linear = base;
    wsd.type = SCHEDULE_WSD;
    linear.type = SCHEDULE_LINEAR;
    wsd.warmup_steps = linear.warmup_steps = 0;
    wsd.decay_ratio = 0.0;
    assert_true(schedule_learning_rate(&wsd, 1000) == wsd.learning_rate);
    wsd.decay_ratio = 1.0;
    for (uint64_t step = 1; step <= 1000; step += 111)
        assert_close(schedule_learning_rate(&wsd, step), schedule_learning_rate(&linear, step));
}

static void wsd_decays_over_a_part_of_a_step_too(void **state)
{
    (void)state;
    struct schedule s = base; /* 10 steps, decay over 2.5: k = 8 is 0.5 / 2.5 into it, k = 9 1.5 */
    s.type = SCHEDULE_WSD;
    s.steps = 10;
    s.warmup_steps = 0;
    s.decay_ratio = 0.25;
    s.min_lr_ratio = 0.0;
    assert_close(schedule_learning_rate(&s, 8), 3e-4);
    assert_close(schedule_learning_rate(&s, 9), 3e-4 * 0.8);
    assert_close(schedule_learning_rate(&s, 10), 3e-4 * 0.4);
}

static void a_warmup_as_long_as_the_run_warns_and_rises_to_its_end(void **state)
{
    (void)state;
    char text[256];
    struct schedule s = base;
    assert_null(schedule_warning(&s, text, sizeof text));
    s.warmup_steps = 1000;
    assert_non_null(schedule_warning(&s, text, sizeof text));
    assert_true(schedule_learning_rate(&s, 1000) == s.learning_rate);
    s.warmup_steps = 2000;
    assert_string_equal(
        schedule_warning(&s, text, sizeof text),
        "warm-up of 2000 steps in a run of 1000: the learning rate rises to its end "
        "and never decays");
    assert_close(schedule_learning_rate(&s, 1000), s.learning_rate / 2);
}

static void the_configuration_becomes_a_schedule(void **state)
{
    (void)state;
    struct config config = {
        .optimizer_learning_rate = 0.5,
        .optimizer_betas = {0.8, 0.9},
        .optimizer_eps = 1e-6,
        .optimizer_weight_decay = 0.25,
        .lr_scheduler_type = CONFIG_SCHEDULE_WSD,
        .lr_scheduler_warmup_ratio = 0.1,
        .lr_scheduler_min_lr_ratio = 0.2,
        .lr_scheduler_decay_ratio = 0.3,
    };
    struct schedule s;
    schedule_init(&s, &config, 101);
    assert_true(s.type == SCHEDULE_WSD && s.steps == 101 && s.warmup_steps == 11);
    assert_true(s.learning_rate == 0.5 && s.beta1 == 0.8 && s.beta2 == 0.9 && s.eps == 1e-6);
    assert_true(s.weight_decay == 0.25 && s.min_lr_ratio == 0.2 && s.decay_ratio == 0.3);
    config.lr_scheduler_warmup_ratio = 0.0;
    config.lr_scheduler_warmup_steps = 7;
    schedule_init(&s, &config, 101);
    assert_true(s.warmup_steps == 7);
}

static void clipping_is_torchs(void **state)
{
    (void)state;
    assert_true(schedule_clip_scale(123.0, 0.0) == 1.0);
    assert_true(schedule_clip_scale(0.0, 1.0) == 1.0);
    assert_true(schedule_clip_scale(0.5, 1.0) == 1.0);
    assert_true(schedule_clip_scale(4.0, 1.0) == 1.0 / 4.000001);
    assert_true(schedule_clip_scale(1.0, 1.0) == 1.0 / 1.000001);
    assert_true(schedule_clip_scale(INFINITY, 1.0) == 0.0);
    assert_true(isnan(schedule_clip_scale(NAN, 1.0)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_are_those_of_transformers),
        cmocka_unit_test(scalars_are_those_of_torch_rounded_once),
        cmocka_unit_test(a_constant_rate_does_not_know_the_length),
        cmocka_unit_test(no_rate_is_negative_or_above_the_rate_asked_for),
        cmocka_unit_test(a_run_without_warmup_starts_at_the_full_rate),
        cmocka_unit_test(wsd_without_decay_is_constant_and_with_all_of_it_linear),
        cmocka_unit_test(wsd_decays_over_a_part_of_a_step_too),
        cmocka_unit_test(a_warmup_as_long_as_the_run_warns_and_rises_to_its_end),
        cmocka_unit_test(the_configuration_becomes_a_schedule),
        cmocka_unit_test(clipping_is_torchs),
    };
    return cmocka_run_group_tests_name("schedule", tests, NULL, NULL);
}
