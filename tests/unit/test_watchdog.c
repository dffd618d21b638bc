/* The watchdog's deadlines: floors, ten times what was seen, and what tests set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    seen(OPERATION_NORM, CONTROL_BEAT_BUCKETS - 1, 1000);             /* none is beyond the last */
    double longest = 10e-6 * (double)((uint64_t)2 << (CONTROL_BEAT_BUCKETS - 1));
    assert_true(watchdog_deadline_s(&control, OPERATION_NORM) >= longest * 0.999);
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

/* A launcher and its workers, all asleep, no counter moving. */
struct stand {
    struct launcher l;
    struct plan plan;
    struct launcher_control orders;
    struct worker_control io, gpu, opt[OPT_WORKERS_MAX];
};

static void add(struct stand *s, enum role role, uint32_t index, struct worker_control *page)
{
    s->l.session.children[s->l.session.n_children++] =
        (struct child){.role = role, .index = index, .state = CHILD_RUNNING};
    atomic_store(&page->sleeping, 1);
}

static struct stand *stand_open(void)
{
    struct stand *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->plan.mode = PLAN_TRAIN;
    s->plan.opt_workers = OPT_WORKERS_MAX;
    s->l.session.plan = &s->plan;
    s->l.session.orders = &s->orders;
    s->l.session.io = &s->io;
    s->l.session.gpu = &s->gpu;
    add(s, ROLE_IO, 0, &s->io);
    add(s, ROLE_GPU, 0, &s->gpu);
    for (uint32_t i = 0; i < OPT_WORKERS_MAX; i++) {
        s->l.session.opt[i] = &s->opt[i];
        add(s, ROLE_OPT, i, &s->opt[i]);
    }
    return s;
}

/* Sixty-six workers that wait are awake for some microseconds ten times a second each: at this rate
 * of looks, one always is. */
static void a_standstill_is_seen_though_somebody_is_always_just_looking_again(void **state)
{
    (void)state;
    assert_int_equal(setenv("MTLAUNCH_SILENCE_S", "0.1", 1), 0); /* a standstill: 2.2 s */
    struct stand *still = stand_open(), *computing = stand_open(), *moving = stand_open();
    int seen_still = 0, seen_computing = 0, seen_moving = 0;
    atomic_store(&computing->gpu.sleeping, 0);
    for (uint32_t look = 0; look < 130; look++) { /* of 20 ms and more */
        _Atomic uint32_t *sleeping = &still->opt[look % OPT_WORKERS_MAX].sleeping;
        atomic_store(sleeping, 0);
        atomic_fetch_add(&moving->io.turns, look % 16 == 0);
        seen_still |= watchdog_nothing_moves(&still->l);
        seen_computing |= watchdog_nothing_moves(&computing->l);
        seen_moving |= watchdog_nothing_moves(&moving->l);
        atomic_store(sleeping, 1);
        (void)usleep(20000);
    }
    free(still);
    free(computing);
    free(moving);
    assert_int_equal(seen_still, 1);
    assert_int_equal(seen_computing, 0);
    assert_int_equal(seen_moving, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(without_statistics_the_floor_holds, fresh),
        cmocka_unit_test_setup(slow_operations_get_ten_times_their_99th_percentile, fresh),
        cmocka_unit_test_setup(tests_replace_the_floors_only, fresh),
        cmocka_unit_test_setup(a_standstill_is_seen_though_somebody_is_always_just_looking_again,
                               fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
