#include "launcher/restart.h"

#include <signal.h>
#include <stdio.h>

#include "ipc/worker.h"
#include "launcher/metrics.h"
#include "launcher/session.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"

void restart_begin(struct launcher *l)
{
    struct restart *r = &l->restart;
    if (r->phase != RESTART_NONE)
        return; /* one more dead one is found when its turn comes */
    r->phase = RESTART_STOPPING;
    r->begun_ns = clock_now_ns();
    l->generation++;
    atomic_store_explicit(&l->session.orders->abort_generation, l->generation,
                          memory_order_release);
    session_wake(l);
}

/* All that live have stopped. One that does not get there in time is killed, which also helps. */
static int all_stopped(struct launcher *l)
{
    int late = clock_seconds_since(l->restart.begun_ns) > RESTART_ACKNOWLEDGE_S, stopped = 1;
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        struct child *child = &l->session.children[i];
        const struct worker_control *control = session_control(l, child);
        if (child->state != CHILD_RUNNING || mutant(MUTANT_no_wait_for_stop) ||
            atomic_load_explicit(&control->acknowledged, memory_order_acquire) == l->generation)
            continue;
        stopped = 0;
        if (late && l->config.run_watchdog)
            child_signal(child, SIGKILL);
    }
    return stopped;
}

static int start_dead(struct launcher *l)
{
    for (uint32_t i = 0; i < l->session.n_children; i++)
        if (l->session.children[i].state == CHILD_DEAD &&
            session_start_again(l, &l->session.children[i]) < 0)
            return -(int)error_kind_now();
    return 0;
}

int restart_turn(struct launcher *l)
{
    struct restart *r = &l->restart;
    CHECK(r->phase != RESTART_NONE);
    if (r->phase == RESTART_STOPPING) {
        if (!all_stopped(l))
            return 0;
        fault_point(FAULT_launcher_before_restart);
        r->phase = RESTART_STARTING;
        r->stopped_ns = clock_now_ns();
        atomic_store_explicit(&l->session.orders->generation, l->generation, memory_order_release);
        session_wake(l);
    }
    if (start_dead(l) < 0)
        return -(int)error_kind_now();
    return session_ready(l);
}

void restart_release(struct launcher *l)
{
    struct restart *r = &l->restart;
    char fields[160];
    fault_point(FAULT_launcher_before_release);
    r->phase = RESTART_NONE;
    (void)snprintf(fields, sizeof fields, ", \"tier\": \"%s\", \"stop_s\": %.6f, \"start_s\": %.6f",
                   r->redo ? "redo" : "T1", (double)(r->stopped_ns - r->begun_ns) * 1e-9,
                   clock_seconds_since(r->stopped_ns));
    metrics_event(l->metrics, "restart", fields);
    r->redo = 0;
    session_release(l);
}
