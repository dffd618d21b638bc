/*
 * The step protocol, as the launcher drives it (ipc/control.h has the picture):
 *
 *     begin s      when s - 1 is decided and nothing holds it (an evaluation of s - 1 that is due)
 *
 *     decide s     when forward and backward of s are done, every worker's norm is there and s - 1
 *                  is complete (committed, where it is due): loss, norm, clipping, skip -> apply;
 *                  s + 1 begins at once, behind it
 *
 *     commit s     when it is due (durability; the last step, an evaluation or export, a stop), io
 *                  has all of s written and hashed, and all lines up to s are durable
 *
 * Every turn re-reads the control pages, so it does not matter which message came or was lost.
 */
#ifndef LAUNCHER_COORDINATOR_H
#define LAUNCHER_COORDINATOR_H

#include "launcher/launcher.h"

/* All workers are READY: reads where the store stands, and lets the first step begin. */
int coordinator_begin(struct launcher *l);

/* After a restart of one worker: goes on after the newest complete step. */
int coordinator_rejoin(struct launcher *l);

/* One turn: 1 the run (or the part of it that was asked for) is done, 0 go on, negative. */
int coordinator_turn(struct launcher *l);

void coordinator_end(struct launcher *l);

/* The newest complete step; the newest committed one. */
uint64_t coordinator_complete(const struct launcher *l);

uint64_t coordinator_committed(const struct launcher *l);

#endif
