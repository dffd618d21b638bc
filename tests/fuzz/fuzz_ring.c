/*
 * A ring whose memory is the input, and a stream of turns on it: consume, publish, scribble
 * (ipc/ring.h).
 *
 *     | log2 depth | generation | frames | head | tail | descriptors ... | turns ... |
 *
 * The oracle knows the rule on its own: a descriptor is taken if and only if it lies between the
 * cursors, its check is that of its count, its generation the ring's and its frames exist.
 */
#include <errno.h>
#include <xxhash.h>

#include "ipc/ring.h"
#include "tests/fuzz/fuzz.h"

enum { DEPTH_LOG_MAX = 5, HEAD_BYTES = 1 + 4 + 4 + 8 + 8, TURNS_MAX = 64 };

struct input_head {
    uint64_t depth, head, tail;
    uint32_t generation, frames;
};

static uint64_t check_of(const struct ring_descriptor *d, uint64_t count)
{
    return XXH3_64bits_withSeed(d, offsetof(struct ring_descriptor, check), count);
}

static struct input_head take_head(struct fuzz_input *in)
{
    struct input_head h;
    h.depth = (uint64_t)1 << fuzz_u8(in) % (DEPTH_LOG_MAX + 1);
    h.generation = fuzz_u32(in);
    h.frames = fuzz_u32(in);
    h.head = fuzz_u64(in);
    h.tail = fuzz_u64(in);
    return h;
}

static int exists(uint32_t frame, uint32_t frames)
{
    return frames == 0 || frame < frames;
}

/* What ring_consume() must say now. */
static int expected(const struct ring *ring, struct ring_descriptor *d)
{
    uint64_t head = ring->producer->head, tail = ring->consumer->tail;
    if (head == tail)
        return 0;
    if (head - tail > ring->depth)
        return -1;
    *d = ring->producer->descriptors[tail % ring->depth];
    return d->check == check_of(d, tail) && d->generation == ring->generation &&
                   exists(d->frame, ring->frames) && exists(d->out_frame, ring->out_frames)
               ? 1
               : -1;
}

static int consume(struct ring *ring)
{
    struct ring_descriptor want, found;
    uint64_t head = ring->producer->head, tail = ring->consumer->tail;
    int rule = expected(ring, &want);
    error_clear();
    int rc = ring_consume(ring, &found);
    REQUIRE(ring->producer->head == head); /* the other side's */
    if (rule < 0) {
        fuzz_refused(rc, FUZZ_DAMAGED);
    } else {
        REQUIRE(rc == rule);
        REQUIRE(rc == 0 || memcmp(&want, &found, sizeof want) == 0);
    }
    REQUIRE(ring->consumer->tail == tail + (rc == 1));
    return rc;
}

static int publish(struct ring *ring, struct fuzz_input *in)
{
    struct ring_descriptor d;
    uint64_t head = ring->producer->head, tail = ring->consumer->tail;
    fuzz_take(in, &d, 16);
    memset((char *)&d + 16, d.frame & 0xff, sizeof d - 16);
    d.frame = ring->frames ? d.frame % ring->frames : 0;
    d.out_frame = ring->out_frames ? d.out_frame % ring->out_frames : 0;
    error_clear();
    int rc = ring_publish(ring, &d);
    REQUIRE(ring->consumer->tail == tail);
    REQUIRE(ring->producer->head == head + (rc == 0));
    if (head - tail > ring->depth)
        fuzz_refused(rc, FUZZ_DAMAGED);
    else
        REQUIRE(rc == (head - tail == ring->depth ? -EAGAIN : 0));
    if (rc < 0)
        return rc;
    const struct ring_descriptor *slot = &ring->producer->descriptors[head % ring->depth];
    REQUIRE(slot->check == check_of(slot, head) && slot->generation == ring->generation);
    REQUIRE(slot->frame == d.frame && slot->visit == d.visit && slot->page == d.page);
    return rc;
}

static void scribble(struct ring *ring, struct fuzz_input *in)
{
    size_t bytes = ring->depth * sizeof(struct ring_descriptor);
    size_t at = fuzz_u32(in) % bytes;
    ((uint8_t *)ring->producer->descriptors)[at] ^= fuzz_u8(in);
}

static void take_turns(struct ring *ring, struct fuzz_input *in)
{
    for (int i = 0; i < TURNS_MAX && in->left > 0; i++)
        switch (fuzz_u8(in) % 4) {
        case 0:
        case 1:
            (void)consume(ring);
            break;
        case 2:
            (void)publish(ring, in);
            break;
        default:
            scribble(ring, in);
        }
    uint64_t taken = 0, waiting = ring_waiting(ring);
    while (consume(ring) == 1)
        taken++;
    REQUIRE(taken <= ring->depth && taken <= waiting);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct input_head h = take_head(&in);
    /* exactly as large as they must be, so that a step outside is seen */
    struct ring ring = {.depth = h.depth, .generation = h.generation, .frames = h.frames};
    ring.out_frames = h.frames;
    ring.producer = calloc(1, ring_producer_bytes(h.depth));
    ring.consumer = calloc(1, sizeof *ring.consumer);
    REQUIRE(ring.producer && ring.consumer);
    fuzz_take(&in, ring.producer->descriptors, h.depth * sizeof(struct ring_descriptor));
    ring.producer->head = h.head;
    ring.consumer->tail = h.tail;
    take_turns(&ring, &in);
    free(ring.producer);
    free(ring.consumer);
    return 0;
}

/* After most mutations the waiting descriptors are sealed for where they lie. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    uint64_t random = seed;
    size = LLVMFuzzerMutate(data, size, max_size);
    struct fuzz_input in = {data, size};
    struct input_head h = take_head(&in);
    if (size < HEAD_BYTES || fuzz_below(&random, 4) == 0)
        return size;
    if (h.head - h.tail > h.depth && fuzz_below(&random, 8) != 0) {
        h.head = h.tail + fuzz_below(&random, h.depth + 1);
        memcpy(data + HEAD_BYTES - 16, &h.head, sizeof h.head);
    }
    for (uint64_t i = 0; i < h.depth && i < h.head - h.tail; i++) {
        struct ring_descriptor d;
        size_t at = HEAD_BYTES + (h.tail + i) % h.depth * sizeof d;
        if (at + sizeof d > size || fuzz_below(&random, 16) == 0)
            continue;
        memcpy(&d, data + at, sizeof d);
        if (fuzz_below(&random, 8) != 0)
            d.generation = h.generation;
        if (fuzz_below(&random, 4) != 0) {
            d.frame = h.frames ? d.frame % h.frames : 0;
            d.out_frame = h.frames ? d.out_frame % h.frames : 0;
        }
        d.check = check_of(&d, h.tail + i);
        memcpy(data + at, &d, sizeof d);
    }
    return size;
}
