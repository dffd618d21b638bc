/*
 * A single-producer single-consumer queue of one-cache-line descriptors in shared memory.
 *
 *   producer's region                          consumer's region
 *   +-------+------------------------------+   +-------+
 *   | head  | descriptor 0 1 2 ... depth-1 |   | tail  |
 *   +-------+------------------------------+   +-------+
 *     only the producer writes here              only the consumer writes here
 *
 * head and tail count for ever; index = count mod depth (a power of two). The producer may write
 * descriptor `head` while head - tail < depth: the acquire load of tail pairs with the consumer's
 * release store, so the consumer's last read of the reused descriptor came before. The consumer may
 * read descriptor `tail` while tail < head: its acquire load of head pairs with the producer's
 * release store in ring_publish(), so descriptor *and payload* written before are visible.
 * The check is seeded with the count, so that a descriptor of an earlier lap is not taken for a new
 * one when a cursor is damaged.
 *
 * Each end also knows by itself how far it has come: a cursor that a failing memory changed would
 * otherwise hide what was lent for ever, or lend it twice. ring_publish() and ring_consume()
 * compare, and so does segment_check_rings() for an end that waits for something else.
 *
 * Payload never moves through a ring: a descriptor lends a frame. Consuming a descriptor frees only
 * its place in the ring; the frame is free when the RETURN ring brings it back.
 *
 *     struct ring_descriptor d = {.frame = f, .page = p, .version = v};
 *     if (ring_publish(ring, &d) == 0) ...          // full: returns -EAGAIN, try again from
 * do_work
 *
 *     while (ring_consume(ring, &d) == 1) ...       // d.frame is borrowed from here on
 */
#ifndef IPC_RING_H
#define IPC_RING_H

#include <stdatomic.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

enum { RING_LINE_BYTES = 64, RING_CURSOR_BYTES = 4096 };

struct ring_descriptor {
    uint32_t frame;      /* index in the ring's pool */
    uint32_t out_frame;  /* STATE: the empty OUT frame; else 0 */
    uint32_t kind;       /* MICROBATCH: enum microbatch_kind; WEIGHTS: enum sweep_kind;
                            STATE_RETURN: enum state_return_kind */
    uint32_t generation; /* of the rings; a consumer refuses another life's descriptor */
    uint64_t page;       /* page number; MICROBATCH: its number within the step */
    uint64_t version;    /* of the page: the step that last changed it */
    uint64_t step;       /* the step this serves */
    uint64_t visit;      /* WEIGHTS: number of the visit */
    uint64_t hash;       /* of the payload: low word of page_image_digest(), made where the data is
                            born, compared where it is used; 0 where the image carries its own */
    uint64_t check;      /* xxh3 of the fields above, seeded with the descriptor's count */
};
_Static_assert(sizeof(struct ring_descriptor) == RING_LINE_BYTES, "a descriptor is one cache line");

/* Lives at the start of the producer's region; written by the producer alone. */
struct ring_producer_area {
    _Atomic uint64_t head;
    unsigned char pad[RING_CURSOR_BYTES - sizeof(uint64_t)];
    struct ring_descriptor descriptors[];
};
_Static_assert(offsetof(struct ring_producer_area, descriptors) == RING_CURSOR_BYTES, "own page");

/* The consumer's region; written by the consumer alone. */
struct ring_consumer_area {
    _Atomic uint64_t tail;
    unsigned char pad[RING_CURSOR_BYTES - sizeof(uint64_t)];
};

/* A process's handle on a ring. Not shared. */
struct ring {
    struct ring_producer_area *producer;
    struct ring_consumer_area *consumer;
    uint64_t depth; /* power of two */
    uint32_t generation;
    uint64_t
        *own; /* what this end's cursor must be, in private memory (segment.h); NULL: not kept */
    /* A descriptor lends a frame below these, or it is refused: a consumer indexes its tables by
     * frame. 0: no such limit. */
    uint32_t frames, out_frames;
};

/* Bytes of the producer's region for a ring of `depth` descriptors. */
uint64_t ring_producer_bytes(uint64_t depth);

/* Publishes a copy of *d (generation and check are filled in). 0; -EAGAIN if the ring is full;
 * another negative value (error_set) if the ring is damaged. */
int ring_publish(struct ring *ring, const struct ring_descriptor *d);

/* The error of a ring that is full where it cannot be. */
int ring_full(const struct ring *ring);

/* Publishes on a ring that is as deep as what can be lent: if it is full, a cursor is damaged. 0,
 * or negative: error_set. */
static inline int ring_lend(struct ring *ring, const struct ring_descriptor *d)
{
    int rc = ring_publish(ring, d);
    return rc == -EAGAIN ? ring_full(ring) : rc;
}

/* Takes the next descriptor: 1 taken, 0 none there, negative: error_set, the ring is damaged. */
int ring_consume(struct ring *ring, struct ring_descriptor *d);

/* Descriptors that wait to be consumed. Exact for either end's own decisions. */
uint64_t ring_waiting(const struct ring *ring);

#endif
