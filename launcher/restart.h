/*
 * T1: one dead worker is restarted; the others keep process, device context and pages in RAM.
 *
 *     NONE       all is well; restart_begin() leads to STOPPING
 *     STOPPING   every worker that lives is asked to leave its operation, and acknowledges when
 *                nothing of it is in flight; then STARTING
 *     STARTING   rings restart from 0; dead workers' successors start (a new io_worker waits behind
 *                the fence first); when all are READY: NONE, and the run goes on after the newest
 *                complete step
 *
 * A worker that dies in STOPPING or STARTING is one more to be restarted. A restart with nobody
 * dead computes the step in flight once more (training.spike = "redo").
 */
#ifndef LAUNCHER_RESTART_H
#define LAUNCHER_RESTART_H

#include "launcher/launcher.h"

enum { RESTART_ACKNOWLEDGE_S = 600 }; /* workers beat while they wait, so the watchdog is blind */

/* A worker died (or none: a redo). Any phase. */
void restart_begin(struct launcher *l);

/* One turn: 1 it is over, the counters may be set for the next step (then restart_release()); 0 it
 * goes on, or there is none (phase NONE); negative. */
int restart_turn(struct launcher *l);

/* All workers may go on. */
void restart_release(struct launcher *l);

static inline int restart_goes_on(const struct launcher *l)
{
    return l->restart.phase != RESTART_NONE;
}

#endif
