/*
 * The event loop of a launcher with live workers: signals, messages, deaths, restarts.
 *
 * Deaths. Any end that was not asked for is unclean, whatever its status. A worker that leaves in
 * order with an error of the user's (2), of space (3) or of use (5) ends the run with that status:
 * starting again would meet it again. Everything else leads to
 *
 *     T1    the dead worker alone is restarted (restart.h), the run goes on after the newest
 *           complete step
 *     T2    all workers are killed, the next io_worker waits behind the store's lock until the dead
 *           one's last I/O is done (the fence), and the run resumes from the newest commit that
 *           verifies (T3: it may be one back) in new shared memory. For damage in a ring, a frame,
 *           the page table or a slot; for the SUPERVISOR_ALONE_MAX + 1st death since the newest
 *           commit; and before all workers were READY
 *     T4    the run ends with the reason and the command that resumes it: three deaths since the
 *           newest commit that look alike, SUPERVISOR_DEATHS_MAX of any look, a worker that cannot
 *           be killed (watchdog.h)
 */
#ifndef LAUNCHER_SUPERVISOR_H
#define LAUNCHER_SUPERVISOR_H

#include "launcher/launcher.h"
#include "launcher/session.h"

enum {
    SUPERVISOR_ALONE_MAX = 2,
    SUPERVISOR_ALIKE_MAX = 3,
    SUPERVISOR_DEATHS_MAX = 10,
    SUPERVISOR_GRACE_MS = 1000, /* all are gone within 2 s of a signal */
};

/* What to do once the workers are READY. A job without a turn is done when io_worker leaves in
 * order. */
struct supervisor_job {
    struct plan_request request;
    int (*begin)(struct launcher *l);  /* may be NULL */
    int (*rejoin)(struct launcher *l); /* after a T1, before the workers go on; PLAN_TRAIN only */
    int (*turn)(struct launcher *l);   /* 1 done, 0 go on, negative */
    void (*done)(struct launcher *l);  /* may be NULL; workers are still there, or left in order */
};

/* Blocks SIGINT, SIGTERM and (unless it was ignored at start) SIGHUP and routes them to
 * l->signal_fd. */
int supervisor_open_signals(struct launcher *l);

/* Runs the job to its end. 0, or negative: -ERROR_STOPPED after a signal. No worker is left. */
int supervisor_run(struct launcher *l, const struct supervisor_job *job);

#endif
