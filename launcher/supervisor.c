#include "launcher/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/worker.h"
#include "launcher/coordinator.h"
#include "launcher/metrics.h"
#include "launcher/progress.h"
#include "launcher/restart.h"
#include "launcher/socket_dir.h"
#include "launcher/watchdog.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"

enum verdict { GO_ON, DONE, RESTART_ONE, RESTART_ALL };

/* What is remembered of deaths, to notice that nothing moves. */
struct obituaries {
    uint64_t step;   /* newest complete step seen at a death; before recovery ends a store says 0 */
    uint32_t deaths; /* since that step */
    uint32_t alike;  /* of them, in a row, with the same cause */
    char cause[160];
};

int supervisor_open_signals(struct launcher *l)
{
    sigset_t set;
    struct sigaction hup;
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGTERM);
    if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN)
        (void)sigaddset(&set, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return error_set(ERROR_FAILED, "sigprocmask: %s", strerror(errno));
    (void)signal(SIGPIPE, SIG_IGN);
    l->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    return l->signal_fd < 0 ? error_set(ERROR_FAILED, "signalfd: %s", strerror(errno)) : 0;
}

static int check_signals(struct launcher *l)
{
    struct signalfd_siginfo info;
    if (read(l->signal_fd, &info, sizeof info) != (ssize_t)sizeof info)
        return 0;
    return error_set(ERROR_STOPPED, "%s: the step in flight is abandoned; start again to resume",
                     strsignal((int)info.ssi_signo));
}

/* -- deaths -- */

static void worker_messages(struct launcher *l)
{
    const char *text = l->session.io->message;
    size_t n = strlen(text);
    if (n)
        progress_say(l->progress, "%.*s", (int)(text[n - 1] == '\n' ? n - 1 : n), text);
}

/* Last words: a failed CHECK, or the error it left with. */
static const char *last_words(const struct worker_control *control)
{
    if (control->panic[0])
        return control->panic;
    return atomic_load_explicit(&control->error_kind, memory_order_acquire) ? control->error : "";
}

static void tell_death(struct launcher *l, const struct child *child, const char *cause,
                       const char *words)
{
    char name[MESSAGE_PEER_BYTES], fields[2 * CONTROL_ERROR_BYTES],
        quoted[CONTROL_ERROR_BYTES + 512];
    worker_name(name, child->role, child->index);
    progress_warn(l->progress, "%s (pid %d) %s after commit of step %llu%s%s", name,
                  (int)child->pid, cause, (unsigned long long)coordinator_committed(l),
                  *words ? ": " : "", words);
    (void)snprintf(
        fields, sizeof fields,
        ", \"worker\": \"%s\", \"pid\": %d, \"cause\": \"%s\", \"committed\": %llu, \"words\": %s",
        name, (int)child->pid, cause, (unsigned long long)coordinator_committed(l),
        metrics_quote(quoted, sizeof quoted, words));
    metrics_event(l->metrics, "worker_exit", fields);
}

static int give_up(struct launcher *l, const struct obituaries *o, const char *words)
{
    (void)error_set(ERROR_FAILED,
                    "no progress: %u deaths since step %llu was complete, the last one: %s%s%s",
                    o->deaths, (unsigned long long)o->step, o->cause, *words ? ": " : "", words);
    return error_hint("the run's state is intact in %s; logs say more; start it again to resume",
                      l->run.path);
}

/* Damage is met again by whoever comes next, and so may be what kills one worker again and again: a
 * new segment and a full recovery are the answer to both. Before all workers were READY there is
 * nothing to keep. */
static enum verdict tier(const struct obituaries *o, uint32_t kind, int begun)
{
    return begun && kind != ERROR_DAMAGED && o->deaths <= SUPERVISOR_ALONE_MAX ? RESTART_ONE
                                                                               : RESTART_ALL;
}

static void count(const struct launcher *l, struct obituaries *o, const char *alike)
{
    uint64_t step = coordinator_complete(l);
    if (step > o->step)
        o->deaths = o->alike = 0;
    o->alike = strcmp(alike, o->cause) == 0 ? o->alike + 1 : 1;
    o->step = step > o->step ? step : o->step;
    o->deaths++;
    (void)snprintf(o->cause, sizeof o->cause, "%s", alike);
}

/* A restart, or negative: the run ends with this error. `begun`: all workers were READY once. */
static int judge(struct launcher *l, struct obituaries *o, const struct child *child, int begun)
{
    const struct worker_control *control = session_control(l, child);
    uint32_t kind = atomic_load_explicit(&control->error_kind, memory_order_acquire);
    char cause[96], alike[160];
    const char *words = child->verdict[0] ? child->verdict : last_words(control);
    (void)child_cause(child, cause, sizeof cause);
    int retry = l->session.plan->mode == PLAN_TRAIN &&
                (kind == ERROR_FAILED || kind == ERROR_DAMAGED || kind == ERROR_ABANDONED);
    /* at a restart it is not somebody else who holds the store, but our own dead worker's I/O */
    if (kind == ERROR_BUSY && l->generation > 1)
        kind = ERROR_FAILED;
    if (WIFEXITED(child->status) && kind != ERROR_NONE && !retry)
        return error_set((enum error_kind)kind, "%s", words);
    tell_death(l, child, cause, words);
    if (l->session.plan->mode != PLAN_TRAIN)
        return error_set(ERROR_FAILED, "%s %s%s%s", topology_role_name(child->role), cause,
                         *words ? ": " : "", words);
    (void)snprintf(alike, sizeof alike, "%s.%u %s", topology_role_name(child->role), child->index,
                   cause);
    count(l, o, alike);
    return o->alike >= SUPERVISOR_ALIKE_MAX || o->deaths >= SUPERVISOR_DEATHS_MAX
               ? give_up(l, o, words)
               : (int)tier(o, kind, begun);
}

/* -- one session -- */

/* Looks at every worker that was alive. GO_ON, a restart after a death, DONE when io left in order
 * and that was the job. */
static int check_children(struct launcher *l, const struct supervisor_job *job,
                          struct obituaries *o, int begun)
{
    int verdict = GO_ON;
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        struct child *child = &l->session.children[i];
        if (child->state != CHILD_RUNNING || !child_poll(child))
            continue;
        if (!job->turn && WIFEXITED(child->status) && WEXITSTATUS(child->status) == 0)
            return DONE;
        int rc = judge(l, o, child, begun);
        if (rc < 0)
            return rc;
        verdict = rc > verdict ? rc : verdict;
    }
    return verdict;
}

static int start_more(struct launcher *l, int *started)
{
    if (*started || atomic_load_explicit(&session_control(l, &l->session.children[0])->ready,
                                         memory_order_acquire) != l->generation)
        return 0;
    *started = 1;
    return session_start_rest(l);
}

/* Until all are READY for the first time: 1 they are, 0 not yet, negative. */
static int start_up(struct launcher *l, const struct supervisor_job *job, int *started)
{
    int rc;
    progress_startup(l->progress, l->session.io);
    if ((rc = start_more(l, started)) < 0)
        return rc;
    if (!job->turn || !session_ready(l))
        return 0;
    if (l->generation == 1)
        worker_messages(l);
    if (job->begin && (rc = job->begin(l)) < 0)
        return rc;
    session_release(l);
    return 1;
}

/* While one worker is being restarted: 1 it goes on, 0 it is over or there is none, negative. */
static int restart_one(struct launcher *l, const struct supervisor_job *job)
{
    if (!restart_goes_on(l))
        return 0;
    progress_startup(l->progress, l->session.io); /* the fence may take minutes */
    int rc = restart_turn(l);
    if (rc <= 0)
        return rc < 0 ? rc : 1;
    if ((rc = job->rejoin(l)) < 0)
        return rc;
    restart_release(l);
    return 0;
}

/* Nobody died, but the workers' facts do not fit, or nothing moves any more: T2, like a death. */
static int start_over(struct launcher *l, struct obituaries *o, const char *what)
{
    progress_warn(l->progress, "%s", what);
    count(l, o, what);
    return o->alike >= SUPERVISOR_ALIKE_MAX || o->deaths >= SUPERVISOR_DEATHS_MAX
               ? give_up(l, o, "")
               : RESTART_ALL;
}

/* What cannot be in a control page was damaged there. */
static int unless_damaged(struct launcher *l, struct obituaries *o, int rc)
{
    return rc == -ERROR_DAMAGED ? start_over(l, o, error_text()) : rc;
}

/* One turn of the job. GO_ON, DONE, RESTART_ALL, or negative. */
static int turn(struct launcher *l, const struct supervisor_job *job, struct obituaries *o)
{
    int rc = job->turn(l);
    if (rc < 0)
        return unless_damaged(l, o, rc);
    if (rc == 0 && l->config.run_watchdog && watchdog_nothing_moves(l))
        return start_over(l, o, "nothing moves: every worker waits for another");
    return rc > 0 ? DONE : rc;
}

/* A successor must find the socket: one that cannot be woken makes every step slow, silently. */
static int restart_tier(const struct launcher *l)
{
    if (socket_dir_is_there(l->session.plan->endpoint))
        return RESTART_ONE;
    progress_warn(l->progress, "%s is gone: something removed it; all workers get another one",
                  l->session.plan->endpoint);
    return RESTART_ALL;
}

/* Until READY, then the job's turns. A verdict, or negative. */
static int live(struct launcher *l, const struct supervisor_job *job, struct obituaries *o)
{
    int started = 0, begun = 0, rc;
    for (;;) {
        if ((rc = session_wait(l, WORKER_POLL_MS)) < 0 || (rc = check_signals(l)) < 0 ||
            (rc = check_children(l, job, o, begun)) < 0)
            return rc;
        if (rc == RESTART_ONE)
            rc = restart_tier(l);
        if (rc == DONE || rc == RESTART_ALL)
            return rc;
        if (rc == RESTART_ONE)
            restart_begin(l);
        if ((rc = watchdog_look(l)) < 0)
            return rc;
        if (!begun) {
            if ((rc = start_up(l, job, &started)) < 0)
                return unless_damaged(l, o, rc);
            begun = rc;
            if (!begun)
                continue;
        }
        if ((rc = restart_one(l, job)) < 0)
            return unless_damaged(l, o, rc);
        if (rc == 0 && (rc = turn(l, job, o)) != GO_ON)
            return rc;
    }
}

static int grace(int rc)
{
    return rc == RESTART_ALL ? 0 : SUPERVISOR_GRACE_MS;
}

int supervisor_run(struct launcher *l, const struct supervisor_job *job)
{
    struct obituaries obituaries = {.step = 0};
    int rc, end;
    do {
        rc = session_open(l, &job->request);
        if (rc == 0)
            rc = live(l, job, &obituaries);
        if (rc == DONE && job->done)
            job->done(l);
        if (rc == RESTART_ALL) {
            metrics_event(l->metrics, "restart", ", \"tier\": \"T2\"");
            progress_say(l->progress, "restarting all workers from the newest commit");
        }
        end = session_close(l, grace(rc));
        if (rc == RESTART_ALL)
            fault_point(FAULT_launcher_restarting_all);
    } while (rc == RESTART_ALL && end == 0);
    return rc < 0 ? rc : end;
}
