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
 * When another worker dies, waits and checks return -ERROR_ABANDONED in every worker that lives.
 * The operation is left like after an error, up to the main loop, which then
 *
 *     finishes its own transfers (completions still write into memory)
 *     worker_rejoin(w)      acknowledges, waits for the launcher, restarts the own ring ends at 0
 *     reopens rings, forgets what was lent and borrowed
 *     worker_ready(w); worker_wait_running(w)
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
    uint64_t beat_ns; /* time of the last heartbeat */
};

/* argv: <segment fd> <index>. Attaches, introduces itself, computes the layout. 0 or negative. */
int worker_start(struct worker *w, enum role role, int argc, char **argv);

/* Set up in this generation; orders may come once all are. */
void worker_ready(struct worker *w);

/* After worker_ready(): until every worker is. 0, -ERROR_ABANDONED, -ERROR_STOPPED. */
int worker_wait_running(struct worker *w);

/* After -ERROR_ABANDONED, when nothing of this process is in flight any more: acknowledges, waits
 * for the launcher, enters the new generation. 0, or -ERROR_STOPPED. */
int worker_rejoin(struct worker *w);

/* What the next heartbeat is waited for. */
void worker_operation(struct worker *w, enum worker_operation operation);

/* Reports what went wrong, if rc < 0, detaches, and returns the exit status. */
int worker_finish(struct worker *w, int rc);

/* Waits a little for something to change. `why`: the ring waited for (its wait is counted), or
 * WORKER_WAIT_OTHER. 0, -ERROR_ABANDONED, -ERROR_STOPPED. */
int worker_pause(struct worker *w, int why);

/* 0, -ERROR_STOPPED when the launcher wants everybody out, -ERROR_ABANDONED, or -ERROR_DAMAGED for
 * an own ring cursor that changed. A heartbeat; for long work without a wait in it. */
int worker_check(struct worker *w);

/* Something in the own control page changed. */
void worker_fact(struct worker *w);

/* A ring towards that worker advanced: rings its bell if it sleeps. */
void worker_bell(struct worker *w, enum role role, uint32_t index);

void worker_progress(struct worker *w, enum worker_activity activity, uint64_t done,
                     uint64_t total);

/* "gpu_worker.0" and the like: log name, and how messages speak of it. `text`: MESSAGE_PEER_BYTES.
 */
void worker_name(char *text, enum role role, uint32_t index);

/* Its routing id, "gpu_worker.0#3": another one in each life, so that no successor is taken for a
 * dead one whose connection lingers. */
void worker_routing_id(char *text, enum role role, uint32_t index, uint32_t incarnation);

#endif
