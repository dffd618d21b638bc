/*
 * The shared segment of one generation: a file in /dev/shm that never has a name, made by the
 * launcher and inherited by the workers as a descriptor, so that nothing of it can be left behind
 * however anybody dies, and nobody else can open it. Not a memfd: /dev/shm has the size that the
 * administrator or the container gave it, and a run that does not fit is to be refused with that
 * number instead of meeting the OOM killer.
 *
 * A process attaches with its role, and gets each region mapped with the access that the topology
 * table gives it, and nothing else.
 */
#ifndef IPC_SEGMENT_H
#define IPC_SEGMENT_H

#include <stdint.h>

#include "ipc/plan.h"
#include "ipc/ring.h"
#include "ipc/topology.h"

/* What the cursors written by this process must be: a role is at most one end of a ring. */
struct segment_cursors {
    int known; /* since segment_reset_rings() */
    uint64_t of[RING_COUNT][OPT_WORKERS_MAX];
};

struct segment {
    int fd;
    enum role role;
    uint32_t index;      /* of an opt_worker; else 0 */
    uint32_t generation; /* of the rings: the plan's, one more after each restart of a worker */
    const struct plan *plan;
    void *regions[REGION_COUNT][OPT_WORKERS_MAX];
    void *producers[RING_COUNT][OPT_WORKERS_MAX], *consumers[RING_COUNT][OPT_WORKERS_MAX];
    struct segment_cursors *own; /* private memory */
};

/* Creates the segment for a placed plan, every byte of it allocated (no SIGBUS later), copies the
 * plan into it. ERROR_FIT with need and have when /dev/shm is too small. */
int segment_create(const struct plan *plan, int *fd);

/* Maps what `role` may see. Checks magic, layout version, sizes and places first. On error nothing
 * stays mapped and `fd` is still the caller's. */
int segment_attach(struct segment *segment, int fd, enum role role, uint32_t index);
/* Unmaps all and closes the descriptor. */
void segment_detach(struct segment *segment);

/* A mapped region; CHECKs that this role maps it. */
void *segment_region(const struct segment *segment, enum region_id region, uint32_t instance);

/* Frame f of a pool. */
void *segment_frame(const struct segment *segment, enum region_id pool, uint32_t instance,
                    uint32_t frame);

/* This process's handle on a ring of which it is an end. */
void segment_ring(const struct segment *segment, enum ring_id ring, uint32_t instance,
                  struct ring *out);

/* Zeroes the cursors that this process writes. Between generations only, when every process that
 * lives has stopped using its rings: a ring starts its new life at index 0 in the same memory,
 * since each of its two areas has one writer, and that one has stopped or is dead and reaped. */
void segment_reset_rings(const struct segment *segment);

/* Whether every cursor that this process writes is what it wrote: 0, or ERROR_DAMAGED naming the
 * ring. Before segment_reset_rings() they may be a predecessor's, and are not looked at. */
int segment_check_rings(const struct segment *segment);

#endif
