/*
 * The architecture as a table: who is there, which memory is shared, which rings connect whom.
 *
 *                        launcher                     control only
 *                           |  ZeroMQ
 *        +------------------+------------------+
 *    io_worker         gpu_worker        opt_worker 0..N-1
 *
 *    io --MICROBATCH--> gpu                 token ids, labels, document bounds
 *    io --WEIGHTS-----> gpu                 compute weights in visiting order
 *    gpu --GRADIENT[i]--> opt i             accumulated f32 gradients, each page once a step
 *    io --STATE[i]----> opt i               a page's image (weights, residual, m, v) + an empty OUT
 * frame opt i --WRITEBACK[i]--> io             the OUT frame, one version on and one RETURN ring
 * for each of the first four: frames given back by the borrower
 *
 * Everything two processes agree on about memory stands in the three lists below. A region is a
 * page-aligned range of the shared segment; each process maps it with just the access that its
 * column says ('-' none, 'r' read, 'w' read and write), so that a stray write in one worker cannot
 * reach another's data. A PER_WORKER region exists once for each opt_worker, and the opt column
 * then speaks of the own one: opt i maps nothing of opt j.
 *
 * A ring is two regions: the producer's (cursor and descriptors) and the consumer's (cursor), since
 * each has one writer.
 */
#ifndef IPC_TOPOLOGY_H
#define IPC_TOPOLOGY_H

#include <stdint.h>

enum role { ROLE_LAUNCHER, ROLE_IO, ROLE_GPU, ROLE_OPT, ROLE_COUNT };

enum { OPT_WORKERS_MAX = 64 };

/*      name        lends a frame of   from       to        per worker  what */
#define RING_LIST(X)                                                                               \
    X(MICROBATCH, MICROBATCH_POOL, ROLE_IO, ROLE_GPU, 0, "token ids, labels, document bounds")     \
    X(MICROBATCH_RETURN, MICROBATCH_POOL, ROLE_GPU, ROLE_IO, 0, "microbatch frames given back")    \
    X(WEIGHTS, WEIGHTS_POOL, ROLE_IO, ROLE_GPU, 0, "compute weights in visiting order")            \
    X(WEIGHTS_RETURN, WEIGHTS_POOL, ROLE_GPU, ROLE_IO, 0, "weights frames given back")             \
    X(GRADIENT, GRADIENT_POOL, ROLE_GPU, ROLE_OPT, 1, "accumulated f32 gradients of a page")       \
    X(GRADIENT_RETURN, GRADIENT_POOL, ROLE_OPT, ROLE_GPU, 1, "gradient frames given back")         \
    X(STATE, STATE_POOL, ROLE_IO, ROLE_OPT, 1, "a page's image and an empty OUT frame")            \
    X(STATE_RETURN, STATE_POOL, ROLE_OPT, ROLE_IO, 1, "image frames given back")                   \
    X(WRITEBACK, OUT_POOL, ROLE_OPT, ROLE_IO, 1, "the page's image, one version on")

enum ring_id {
#define X(name, pool, from, to, per, text) RING_##name,
    RING_LIST(X)
#undef X
        RING_COUNT
};

/*      name             launcher io  gpu opt  per worker  what */
#define REGION_LIST(X)                                                                             \
    X(PLAN, "w", "r", "r", "r", 0, "what to do: the resolved run file, prompts")                   \
    X(LAUNCHER_CONTROL, "w", "r", "r", "r", 0, "step protocol: what may begin")                    \
    X(IO_CONTROL, "r", "w", "r", "r", 0, "facts, counters, panic text of io_worker")               \
    X(GPU_CONTROL, "r", "r", "w", "r", 0, "facts, counters, panic text of gpu_worker")             \
    X(OPT_CONTROL, "r", "r", "r", "w", 1, "facts, counters, panic text of an opt_worker")          \
    X(NORM, "r", "-", "-", "w", 1, "a page's sum of squared gradients, one writer per entry")      \
    X(PAGE_TABLE, "r", "w", "-", "-", 0, "versions, slots and digests of every page")              \
    X(GENERATED, "r", "-", "w", "-", 0, "token ids of samples and of the generate command")        \
    X(MICROBATCH_POOL, "-", "w", "r", "-", 0, "frames: microbatches")                              \
    X(WEIGHTS_POOL, "-", "w", "r", "-", 0, "frames: compute weights of a page")                    \
    X(GRADIENT_POOL, "-", "-", "w", "r", 0, "frames: f32 gradient of a page")                      \
    X(STATE_POOL, "-", "w", "-", "r", 1, "frames: page images read from the store")                \
    X(OUT_POOL, "-", "w", "-", "w", 1, "frames: page images on their way to the store")

enum region_id {
#define X(name, launcher, io, gpu, opt, per, text) REGION_##name,
    REGION_LIST(X)
#undef X
        REGION_COUNT
};

struct region_row {
    const char *name;
    const char *access[ROLE_COUNT]; /* "-", "r" or "w" */
    int per_worker;
    const char *text;
};

struct ring_row {
    const char *name;
    enum region_id pool;
    enum role from, to;
    int per_worker;
    const char *text;
};

extern const struct region_row topology_regions[REGION_COUNT];
extern const struct ring_row topology_rings[RING_COUNT];

/* "launcher", "io_worker", "gpu_worker", "opt_worker": also the process names. */
const char *topology_role_name(enum role role);

/* Which opt_worker owns a page: page numbers go round, so that each layer is spread over all. */
static inline uint32_t topology_page_owner(uint64_t page, uint32_t opt_workers)
{
    return (uint32_t)(page % opt_workers);
}

/* The page's place among those of its owner. */
static inline uint64_t topology_page_rank(uint64_t page, uint32_t opt_workers)
{
    return page / opt_workers;
}

#endif
