#include "launcher/watchdog.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "ipc/worker.h"
#include "launcher/progress.h"
#include "launcher/session.h"
#include "procs/clock.h"
#include "procs/error.h"

#define X(name, text, floor_s) text,
static const char *const operation_texts[] = {WORKER_OPERATION_LIST(X)};
#undef X
#define X(name, text, floor_s) floor_s,
static const double operation_floors[] = {WORKER_OPERATION_LIST(X)};
#undef X

/* Tests cannot wait for minutes. 0: not set. */
static double silence_s(void)
{
    const char *text = getenv("MTLAUNCH_SILENCE_S");
    double seconds = text ? strtod(text, NULL) : 0.0;
    return seconds > 0.0 ? seconds : 0.0;
}

/* Upper end of the bucket that holds the 99th percentile, in seconds; 0 without enough beats. */
static double percentile99_s(const struct worker_control *control, enum worker_operation operation)
{
    uint64_t total = 0, seen = 0;
    const _Atomic uint32_t *beats = control->beats[operation];
    for (int i = 0; i < CONTROL_BEAT_BUCKETS; i++)
        total += atomic_load_explicit(&beats[i], memory_order_relaxed);
    if (total < WATCHDOG_BEATS_MIN)
        return 0.0;
    for (int i = 0; i < CONTROL_BEAT_BUCKETS; i++) {
        seen += atomic_load_explicit(&beats[i], memory_order_relaxed);
        if (seen * 100 >= total * 99)
            return (double)((uint64_t)2 << i) * 1e-6;
    }
    return 0.0;
}

double watchdog_deadline_s(const struct worker_control *control, enum worker_operation operation)
{
    double floor = operation_floors[operation], p99 = percentile99_s(control, operation);
    double wanted = silence_s();
    if (p99 == 0.0 && operation == OPERATION_COMPUTE && floor < WATCHDOG_UNKNOWN_S)
        floor = WATCHDOG_UNKNOWN_S; /* a first layer on a slow device */
    if (wanted > 0.0)
        floor = wanted;
    return p99 * 10.0 > floor ? p99 * 10.0 : floor;
}

static double seconds_between(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (double)(to_ns - from_ns) * 1e-9 : 0.0;
}

/* Why this worker has to go, in child->verdict; 0 if it need not. */
static int is_overdue(const struct launcher *l, struct child *child, uint64_t now)
{
    const struct worker_control *control = session_control(l, child);
    uint32_t operation =
        atomic_load_explicit(&control->operation, memory_order_relaxed) % OPERATION_COUNT;
    uint64_t request = atomic_load_explicit(&control->oldest_io_ns, memory_order_acquire);
    double silence = seconds_between(child->alive_ns, now), wanted = silence_s();
    double deadline = watchdog_deadline_s(control, (enum worker_operation)operation);
    double io_deadline = wanted > 0.0 ? wanted : WATCHDOG_REQUEST_S;
    if (silence > deadline) {
        int waits = child->role == ROLE_IO && request != 0;
        (void)snprintf(child->verdict, sizeof child->verdict,
                       "no heartbeat for %.1f s (limit %.1f s) while %s%s%s", silence, deadline,
                       operation_texts[operation], waits ? "; it waits for " : "",
                       waits ? control->oldest_io : "");
        return 1;
    }
    if (child->role != ROLE_IO || request == 0 || !session_introduced(l, child) ||
        seconds_between(request + child->paused_ns, now) <= io_deadline)
        return 0;
    (void)snprintf(child->verdict, sizeof child->verdict,
                   "a request does not complete for %.1f s (limit %.1f s): %s",
                   seconds_between(request, now), io_deadline, control->oldest_io);
    return 1;
}

/* In tests that shorten the deadlines this one is shorter too. */
double watchdog_reap_s(void)
{
    double wanted = silence_s();
    return wanted > 0.0 ? 5.0 * wanted : WATCHDOG_REAP_S;
}

/* Told when it is done, not only at the funeral: what sleeps in the kernel may take its time. */
static int end(const struct launcher *l, struct child *child, uint64_t now)
{
    char name[MESSAGE_PEER_BYTES];
    if (child->abort_ns == 0) {
        child->abort_ns = now;
        worker_name(name, child->role, child->index);
        progress_warn(l->progress, "%s (pid %d) is ended: %s", name, (int)child->pid,
                      child->verdict);
        child_signal(child, SIGABRT);
    } else if (child->kill_ns == 0 && seconds_between(child->abort_ns, now) > WATCHDOG_ABORT_S) {
        child->kill_ns = now;
        child_signal(child, SIGKILL);
    } else if (child->kill_ns && seconds_between(child->kill_ns, now) > watchdog_reap_s()) {
        worker_name(name, child->role, child->index);
        (void)error_set(ERROR_FAILED,
                        "%s (pid %d) cannot be killed; nothing is started beside it: %s", name,
                        (int)child->pid, child->verdict);
        return error_hint("the run's state is intact in %s; when that process is gone (its device "
                          "may be stuck: dmesg), start again to resume",
                          l->run.path);
    }
    return 0;
}

int watchdog_look(struct launcher *l)
{
    uint64_t now = clock_now_ns();
    uint64_t away = l->watched_ns && now - l->watched_ns > WATCHDOG_PAUSE_S * UINT64_C(1000000000)
                        ? now - l->watched_ns
                        : 0;
    l->watched_ns = now;
    l->moved_ns += l->moved_ns ? away : 0;
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        struct child *child = &l->session.children[i];
        if (child->state != CHILD_RUNNING)
            continue;
        uint64_t beat =
            atomic_load_explicit(&session_control(l, child)->heartbeat, memory_order_relaxed);
        child->paused_ns += away;
        if (beat != child->heartbeat)
            child->alive_ns = now;
        else
            child->alive_ns += away;
        child->asleep_ns += away;
        child->heartbeat = beat;
        int ending = child->abort_ns != 0;
        if ((ending || (l->config.run_watchdog && is_overdue(l, child, now))) &&
            end(l, child, now) < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

static uint64_t fact(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* Changes with anything that any worker gets done. */
static uint64_t movement(const struct launcher *l)
{
    const struct session *s = &l->session;
    uint64_t sum = fact(&s->orders->begin_step) + fact(&s->orders->apply_step) +
                   fact(&s->orders->commit_step) + fact(&s->orders->export_step);
    sum += fact(&s->gpu->forward_step) + fact(&s->gpu->backward_step) + fact(&s->gpu->evaluated) +
           fact(&s->gpu->generated) + fact(&s->gpu->sweep_request);
    sum += fact(&s->io->complete_step) + fact(&s->io->committed_step) +
           fact(&s->io->exported_step) + fact(&s->io->bytes_read) + fact(&s->io->bytes_written);
    for (uint32_t i = 0; i < s->plan->opt_workers; i++)
        sum += fact(&s->opt[i]->norm_step) + fact(&s->opt[i]->pages_updated);
    for (uint32_t i = 0; i < s->n_children; i++)
        sum += fact(&session_control(l, &s->children[i])->turns);
    return sum;
}

/* A worker that waits wakes ten times a second to look again. With many of them one is always
 * found awake in that moment, so only who was awake at every look of a second is busy. */
static int anybody_busy(struct launcher *l, uint64_t now)
{
    int busy = 0;
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        struct child *child = &l->session.children[i];
        const struct worker_control *w = session_control(l, child);
        if (atomic_load_explicit(&w->sleeping, memory_order_relaxed))
            child->asleep_ns = now;
        busy |= child->abort_ns != 0 /* it is being ended already, and told of */ ||
                seconds_between(child->asleep_ns, now) > WATCHDOG_AWAKE_S ||
                fact(&w->oldest_io_ns) != 0;
    }
    return busy;
}

int watchdog_nothing_moves(struct launcher *l)
{
    uint64_t now = clock_now_ns();
    if (l->session.plan->mode != PLAN_TRAIN)
        return 0;
    uint64_t moved = movement(l);
    int busy = anybody_busy(l, now);
    if (moved != l->moved || l->moved_ns == 0 || l->coordinator.paused || l->samples || busy) {
        l->moved = moved;
        l->moved_ns = now;
    }
    double wanted = silence_s(); /* io_worker names a request after a second: that comes first */
    return seconds_between(l->moved_ns, now) >
           (wanted > 0.0 ? 2.0 * wanted + 2.0 : WATCHDOG_STALL_S);
}
