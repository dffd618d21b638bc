/*
 * One generation: the segment, the control channel and the workers on them, from the first start to
 * the last reap. A restart after a death (T2) closes one session and opens the next.
 */
#ifndef LAUNCHER_SESSION_H
#define LAUNCHER_SESSION_H

#include "launcher/launcher.h"
#include "launcher/plan_build.h"
#include "launcher/run_dir.h"

/* Builds the plan, creates the segment, binds the channel, starts gpu_worker (or, where the mode
 * has none, io_worker). The others follow when it is READY: session_start_rest(). */
int session_open(struct launcher *l, const struct plan_request *request);

int session_start_rest(struct launcher *l);

/* 1 when every worker of the mode is started and READY. */
int session_ready(const struct launcher *l);

/* Starts the successor of a dead child, in its place and in the present generation. */
int session_start_again(struct launcher *l, struct child *child);

/* All are READY in this generation and the counters are set: rings may be used. */
void session_release(struct launcher *l);

/* Ends it: tells everybody to leave, waits `grace_ms`, kills, reaps, releases everything. 0, or
 * ERROR_FAILED for a worker that cannot be killed: nothing may be started then. */
int session_close(struct launcher *l, int grace_ms);

/* Wakes all workers to look at the launcher's page. */
void session_wake(struct launcher *l);

/* Sleeps until something happens (at most `timeout_ms`), then takes in all messages. */
int session_wait(struct launcher *l, int timeout_ms);

/* 1 when the control page speaks of this child: until it has introduced itself, what stands there
 * (READY, the age of a request) may be of a dead predecessor. */
int session_introduced(const struct launcher *l, const struct child *child);

/* The control page of a child. */
const struct worker_control *session_control(const struct launcher *l, const struct child *child);

#endif
