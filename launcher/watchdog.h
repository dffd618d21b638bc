/*
 * Deadlines: a worker that stops moving is ended, so that the run can go on.
 *
 * Each worker says what it is doing and beats at every boundary (ipc/worker.h); how long each kind
 * of operation takes from beat to beat is counted in its control page. The deadline of an operation
 * is the larger of its floor (ipc/control.h) and ten times the 99th percentile seen. An I/O request
 * has one too, since io_worker's loop goes on turning while a drive does not answer.
 *
 * Past the deadline: SIGABRT, for the stack; WATCHDOG_ABORT_S later SIGKILL; and a worker that does
 * not even die of that within WATCHDOG_REAP_S ends the run (T4): nothing is started beside a writer
 * that may still live. While the launcher itself did not run (stopped, starved, suspended), nobody
 * else is judged by that time.
 */
#ifndef LAUNCHER_WATCHDOG_H
#define LAUNCHER_WATCHDOG_H

#include "launcher/launcher.h"

enum {
    WATCHDOG_BEATS_MIN = 100, /* fewer are no statistics */
    WATCHDOG_UNKNOWN_S = 600, /* the deadline until then, where the floor is lower */
    WATCHDOG_STALL_S = 60,    /* everybody waits */
    WATCHDOG_AWAKE_S = 1,     /* longer than a look that found nothing takes: it works */
    WATCHDOG_REQUEST_S = 120, /* for one I/O request */
    WATCHDOG_ABORT_S = 5,     /* from SIGABRT to SIGKILL */
    WATCHDOG_REAP_S = 120,    /* from SIGKILL to the end of the run */
    WATCHDOG_PAUSE_S = 1,     /* a turn of the launcher's loop that took longer was a pause */
};

/* One look at every worker; part of the launcher's loop. 0, or ERROR_FAILED for a worker that
 * cannot be killed. MTLAUNCH_SILENCE_S replaces all floors, for tests. */
int watchdog_look(struct launcher *l);

/* How long after SIGKILL a worker may still be there. */
double watchdog_reap_s(void);

/* 1: for WATCHDOG_STALL_S every worker has only waited, no request in flight, and no counter of the
 * step protocol has moved, though the run is not paused: a lost descriptor or a wrong counter. */
int watchdog_nothing_moves(struct launcher *l);

/* Seconds that `operation` of this worker may take from beat to beat. */
double watchdog_deadline_s(const struct worker_control *control, enum worker_operation operation);

#endif
