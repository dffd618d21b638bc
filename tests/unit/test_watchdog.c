/* The watchdog's deadlines: floors, ten times what was seen, and what tests set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/watchdog.h"

static struct worker_control control;

static void seen(enum worker_operation operation, int bucket, uint32_t times)
{
    atomic_store(&control.beats[operation][bucket], times);
}

static int fresh(void **state)
{
    (void)state;
    memset(&control, 0, sizeof control);
    return unsetenv("MTLAUNCH_SILENCE_S");
}

static void without_statistics_the_floor_holds(void **state)
{
    (void)state;
    assert_true(watchdog_deadline_s(&control, OPERATION_NORM) == 60);
    assert_true(watchdog_deadline_s(&control, OPERATION_EXPORT) == 600);
    /* how long a layer takes on this device is not known before the first */
    assert_true(watchdog_deadline_s(&control, OPERATION_COMPUTE) == WATCHDOG_UNKNOWN_S);
    seen(OPERATION_COMPUTE, 10, WATCHDOG_BEATS_MIN - 1);
    assert_true(watchdog_deadline_s(&control, OPERATION_COMPUTE) == WATCHDOG_UNKNOWN_S);
    seen(OPERATION_COMPUTE, 10, WATCHDOG_BEATS_MIN);
    assert_true(watchdog_deadline_s(&control, OPERATION_COMPUTE) == 120);
}

static void slow_operations_get_ten_times_their_99th_percentile(void **state)
{
    (void)state;
    seen(OPERATION_APPLY, 5, 990);
    seen(OPERATION_APPLY, 30, 10); /* the slowest 1 % do not count */
    assert_true(watchdog_deadline_s(&control, OPERATION_APPLY) == 60);
    seen(OPERATION_APPLY, 5, 980);
    seen(OPERATION_APPLY, 24, 20); /* 16.8 to 33.6 s */
    assert_true(watchdog_deadline_s(&control, OPERATION_APPLY) == 10 * 33.554432);
    assert_true(watchdog_deadline_s(&control, OPERATION_NORM) == 60); /* each has its own */
}

static void tests_replace_the_floors_only(void **state)
{
    (void)state;
    assert_int_equal(setenv("MTLAUNCH_SILENCE_S", "1.5", 1), 0);
    assert_true(watchdog_deadline_s(&control, OPERATION_EXPORT) == 1.5);
    seen(OPERATION_EXPORT, 20, 1000); /* 1 to 2 s */
    double deadline = watchdog_deadline_s(&control, OPERATION_EXPORT);
    assert_true(deadline > 20.971 && deadline < 20.972);
    assert_int_equal(setenv("MTLAUNCH_SILENCE_S", "nonsense", 1), 0);
    assert_true(watchdog_deadline_s(&control, OPERATION_START) == 600);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(without_statistics_the_floor_holds, fresh),
        cmocka_unit_test_setup(slow_operations_get_ten_times_their_99th_percentile, fresh),
        cmocka_unit_test_setup(tests_replace_the_floors_only, fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
