/* Spikes: the running median, the window, and the verdict on a step that was computed again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "launcher/spike.h"

static void the_median_is_the_middle(void **state)
{
    const double odd[] = {5, 1, 9}, even[] = {4, 1, 3, 100}, same[] = {2, 2, 2, 2, 2};
    double many[SPIKE_WINDOW_STEPS];
    (void)state;
    assert_true(spike_median(odd, 3) == 5);
    assert_true(spike_median(even, 4) == 3.5);
    assert_true(spike_median(same, 5) == 2);
    assert_true(spike_median(odd, 1) == 5);
    for (int i = 0; i < SPIKE_WINDOW_STEPS; i++)
        many[i] = (i * 7) % SPIKE_WINDOW_STEPS; /* 0 .. 31, shuffled */
    assert_true(spike_median(many, SPIKE_WINDOW_STEPS) == 15.5);
}

static void a_full_window_forgets_the_oldest(void **state)
{
    struct spike_window w;
    (void)state;
    memset(&w, 0, sizeof w);
    for (int i = 0; i < 40; i++)
        spike_window_push(&w.count, w.loss, w.norm, i, -i);
    assert_int_equal(w.count, SPIKE_WINDOW_STEPS);
    assert_true(w.loss[0] == 8 && w.loss[31] == 39 && w.norm[31] == -39);
}

static void a_spike_is_above_the_factor_of_either_median(void **state)
{
    struct spike_window w;
    (void)state;
    memset(&w, 0, sizeof w);
    for (int i = 0; i < SPIKE_STEPS_MIN - 1; i++)
        spike_window_push(&w.count, w.loss, w.norm, 2.0, 1.0);
    assert_int_equal(spike_found(&w, 1e9, 1e9, 10.0), 0); /* too few steps to say */
    spike_window_push(&w.count, w.loss, w.norm, 2.0, 1.0);
    assert_int_equal(spike_found(&w, 20.0, 10.0, 10.0), 0); /* exactly the factor is none */
    assert_int_equal(spike_found(&w, nextafter(20.0, 21.0), 1.0, 10.0), 1);
    assert_int_equal(spike_found(&w, 2.0, nextafter(10.0, 11.0), 10.0), 1);
    assert_int_equal(spike_found(&w, 0.0, 0.0, 10.0), 0);
}

static void two_equal_computations_decide(void **state)
{
    struct spike_redo r;
    (void)state;
    memset(&r, 0, sizeof r);
    assert_int_equal(spike_judge(&r, 7, 1, 1), SPIKE_AGAIN);
    assert_int_equal(spike_judge(&r, 7, 1, 1), SPIKE_DATA);
    assert_int_equal(spike_judge(&r, 9, 1, 1), SPIKE_AGAIN); /* another step begins anew */
    assert_int_equal(spike_judge(&r, 9, 1, 2), SPIKE_AGAIN);
    assert_int_equal(spike_judge(&r, 9, 2, 2), SPIKE_AGAIN);
    assert_int_equal(spike_judge(&r, 9, 1, 2), SPIKE_HARDWARE);
    for (uint64_t i = 0; i + 1 < SPIKE_COMPUTATIONS_MAX; i++)
        assert_int_equal(spike_judge(&r, 10, i, 0), SPIKE_AGAIN);
    assert_int_equal(spike_judge(&r, 10, 99, 0), SPIKE_LOST);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_median_is_the_middle),
        cmocka_unit_test(a_full_window_forgets_the_oldest),
        cmocka_unit_test(a_spike_is_above_the_factor_of_either_median),
        cmocka_unit_test(two_equal_computations_decide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
