/*
 * What every worker is: attached to the shared segment, introduced to the launcher, with one place
 * to sleep.
 *
 *     int main(int argc, char **argv)
 *     {
 *         struct worker w;
 *         int rc = worker_start(&w, ROLE_OPT, argc, argv);
 *         if (rc == 0)
 *             rc = run(&w);
 *         return worker_finish(&w, rc);
 *     }
 *
 * and in run(), wherever something has to come first:
 *
 *     while ((n = ring_consume(&ring, &d)) == 0)
 *         if ((rc = worker_pause(w, RING_GRADIENT)) < 0)
 *             return rc;                     // -ERROR_STOPPED: the launcher said leave
 *
 * Sleeping without losing a wake-up: worker_pause() first raises `sleeping` and returns, so that
 * the caller looks once more; only the next pause polls. Whoever publishes looks at `sleeping`
 * after its release store (worker_bell()); the fences on both sides are sequentially consistent, so
 * one of the two sees the other. A poll ends after 100 ms in any case: the truth is in shared
 * memory.
 */
#ifndef IPC_WORKER_H
#define IPC_WORKER_H

#include "ipc/control.h"
#include "ipc/endpoint.h"
#include "ipc/segment.h"

enum { WORKER_POLL_MS = 100, WORKER_WAIT_OTHER = RING_COUNT };

struct worker {
    struct segment segment;
    const struct plan *plan;
    const struct launcher_control *orders;
    struct worker_control *self;
    struct endpoint *endpoint;
    struct model_layout layout;
    int event_fd; /* readable when an I/O or device completion waits; -1 = none */
    int armed;    /* `sleeping` is up and the caller has looked since */
    int parent_pid;
};

/* argv: <segment fd> <index>. Attaches, introduces itself, computes the layout. 0 or negative. */
int worker_start(struct worker *w, enum role role, int argc, char **argv);

/* Set up; orders may come. */
void worker_ready(struct worker *w);

/* Reports what went wrong, if rc < 0, detaches, and returns the exit status. */
int worker_finish(struct worker *w, int rc);

/* Waits a little for something to change. `why`: the ring waited for (its wait is counted), or
 * WORKER_WAIT_OTHER. 0, or -ERROR_STOPPED. */
int worker_pause(struct worker *w, int why);

/* 0, or -ERROR_STOPPED when the launcher wants everybody out. For long work without a wait in it.
 */
int worker_check(struct worker *w);

/* Something in the own control page changed. */
void worker_fact(struct worker *w);

/* A ring towards that worker advanced: rings its bell if it sleeps. */
void worker_bell(struct worker *w, enum role role, uint32_t index);

void worker_progress(struct worker *w, enum worker_activity activity, uint64_t done,
                     uint64_t total);

/* "gpu_worker.0" and the like: routing id and log name. `text`: MESSAGE_PEER_BYTES. */
void worker_name(char *text, enum role role, uint32_t index);

#endif
