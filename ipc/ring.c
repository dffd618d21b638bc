#include "ipc/ring.h"

#include <errno.h>
#include <xxhash.h>

#include "procs/error.h"
#include "procs/mutant.h"

uint64_t ring_producer_bytes(uint64_t depth)
{
    return RING_CURSOR_BYTES + depth * sizeof(struct ring_descriptor);
}

static uint64_t descriptor_check(const struct ring_descriptor *d, uint64_t count)
{
    return XXH3_64bits_withSeed(d, offsetof(struct ring_descriptor, check), count);
}

static int cursors_damaged(uint64_t head, uint64_t tail, uint64_t depth)
{
    return error_set(ERROR_DAMAGED, "ring damaged: head %llu, tail %llu, depth %llu",
                     (unsigned long long)head, (unsigned long long)tail, (unsigned long long)depth);
}

int ring_full(const struct ring *ring)
{
    return cursors_damaged(atomic_load_explicit(&ring->producer->head, memory_order_relaxed),
                           atomic_load_explicit(&ring->consumer->tail, memory_order_relaxed),
                           ring->depth);
}

/* Nobody else writes the own cursor. */
static int check_own(const struct ring *ring, const char *name, uint64_t found)
{
    if (!ring->own || *ring->own == found)
        return 0;
    return error_set(ERROR_DAMAGED, "ring damaged: own %s: expected %llu, found %llu", name,
                     (unsigned long long)*ring->own, (unsigned long long)found);
}

static int frame_missing(uint64_t count, const char *field, uint32_t frame, uint32_t frames)
{
    return error_set(ERROR_DAMAGED, "ring descriptor %llu: %s %u, expected one of %u",
                     (unsigned long long)count, field, frame, frames);
}

int ring_publish(struct ring *ring, const struct ring_descriptor *d)
{
    /* own cursor: relaxed. The consumer's: acquire, pairs with the release in ring_consume(). */
    uint64_t head = atomic_load_explicit(&ring->producer->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->consumer->tail, memory_order_acquire);
    if (check_own(ring, "head", head) < 0)
        return -(int)error_kind_now();
    if (head - tail > ring->depth)
        return cursors_damaged(head, tail, ring->depth);
    if (head - tail == ring->depth)
        return -EAGAIN;
    struct ring_descriptor *slot = &ring->producer->descriptors[head & (ring->depth - 1)];
    *slot = *d;
    slot->generation = ring->generation;
    slot->check = descriptor_check(slot, head);
    /* release: pairs with the acquire in ring_consume() */
    atomic_store_explicit(&ring->producer->head, head + 1, memory_order_release);
    if (ring->own)
        *ring->own = head + 1;
    return 0;
}

int ring_consume(struct ring *ring, struct ring_descriptor *d)
{
    uint64_t tail = atomic_load_explicit(&ring->consumer->tail, memory_order_relaxed);
    uint64_t head = atomic_load_explicit(&ring->producer->head, memory_order_acquire);
    if (check_own(ring, "tail", tail) < 0)
        return -(int)error_kind_now();
    if (head == tail)
        return 0;
    if (head - tail > ring->depth)
        return cursors_damaged(head, tail, ring->depth);
    *d = ring->producer->descriptors[tail & (ring->depth - 1)];
    uint64_t check = descriptor_check(d, tail);
    if (d->check != check && !mutant(MUTANT_no_descriptor_check))
        return error_set(
            ERROR_DAMAGED, "ring descriptor %llu damaged: check expected %016llx, found %016llx",
            (unsigned long long)tail, (unsigned long long)check, (unsigned long long)d->check);
    if (d->generation != ring->generation && !mutant(MUTANT_no_generation_check))
        return error_set(ERROR_DAMAGED, "ring descriptor %llu of generation %u, expected %u",
                         (unsigned long long)tail, d->generation, ring->generation);
    if (ring->frames && d->frame >= ring->frames && !mutant(MUTANT_no_descriptor_check))
        return frame_missing(tail, "frame", d->frame, ring->frames);
    if (ring->out_frames && d->out_frame >= ring->out_frames && !mutant(MUTANT_no_descriptor_check))
        return frame_missing(tail, "OUT frame", d->out_frame, ring->out_frames);
    atomic_store_explicit(&ring->consumer->tail, tail + 1, memory_order_release);
    if (ring->own)
        *ring->own = tail + 1;
    return 1;
}

uint64_t ring_waiting(const struct ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->consumer->tail, memory_order_acquire);
    uint64_t head = atomic_load_explicit(&ring->producer->head, memory_order_acquire);
    return head - tail;
}
