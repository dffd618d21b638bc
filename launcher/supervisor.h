/*
 * The event loop of a launcher with live workers: signals, messages, deaths, restarts.
 *
 * Deaths. Any end that was not asked for is unclean, whatever its status. A worker that leaves in
 * order with an error of the user's (2), of space (3) or of use (5) ends the run with that status:
 * starting again would meet it again. Everything else leads to T2: all workers are killed, the next
 * io_worker waits behind the store's lock until the dead one's last I/O is done (the fence), and
 * the run resumes from the newest commit in new shared memory.
 *
 * Limits count progress: three deaths at the same step that look alike, or SUPERVISOR_DEATHS_MAX of
 * any look, end the run (T4) with the reason and the command that resumes it.
 *
 * The watchdog: a worker whose main loop has not turned for SUPERVISOR_SILENCE_S gets SIGABRT (a
 * core or stack says where), then SIGKILL. run.watchdog = false turns it off.
 */
#ifndef LAUNCHER_SUPERVISOR_H
#define LAUNCHER_SUPERVISOR_H

#include "launcher/launcher.h"
#include "launcher/session.h"

enum {
    SUPERVISOR_ALIKE_MAX = 3,
    SUPERVISOR_DEATHS_MAX = 10,
    SUPERVISOR_SILENCE_S = 600, /* MTLAUNCH_SILENCE_S sets another, for tests */
    SUPERVISOR_ABORT_S = 5,     /* from SIGABRT to SIGKILL */
    SUPERVISOR_GRACE_MS = 1000, /* all are gone within 2 s of a signal */
};

/* What to do once the workers are READY. A job without a turn is done when io_worker leaves in
 * order. */
struct supervisor_job {
    struct plan_request request;
    int (*begin)(struct launcher *l); /* may be NULL */
    int (*turn)(struct launcher *l);  /* 1 done, 0 go on, negative */
    void (*done)(struct launcher *l); /* may be NULL; workers are still there, or left in order */
};

/* Blocks SIGINT, SIGTERM and (unless it was ignored at start) SIGHUP and routes them to
 * l->signal_fd. */
int supervisor_open_signals(struct launcher *l);

/* Runs the job to its end. 0, or negative: -ERROR_STOPPED after a signal. No worker is left. */
int supervisor_run(struct launcher *l, const struct supervisor_job *job);

#endif
