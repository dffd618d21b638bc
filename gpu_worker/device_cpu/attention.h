/* What the attention operations of the CPU device share: tiles and masks. */
#ifndef GPU_WORKER_DEVICE_CPU_ATTENTION_H
#define GPU_WORKER_DEVICE_CPU_ATTENTION_H

#include "gpu_worker/device_cpu/cpu.h"

/* Constants of the lineage. Two tiles of QUERIES x KEYS scores fit in CPU_SCRATCH_FLOATS. */
enum {
    ATTENTION_QUERIES = 128,       /* query rows of a tile */
    ATTENTION_KEYS = 256,          /* keys of a tile in forward */
    ATTENTION_BACKWARD_KEYS = 128, /* keys of a tile in backward */
};

static inline uint64_t attention_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t attention_most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The first key that a query sees: of its document, and of its window. */
static inline uint64_t attention_from(uint64_t query, uint64_t document_start, uint64_t window)
{
    uint64_t first = window == 0 || query < window ? 0 : query - window + 1;
    return attention_most(document_start, first);
}

/* The first key that any query of [start, end) sees; `document_start` is the row's. */
static inline uint64_t attention_first_key(const int32_t *document_start, uint64_t start,
                                           uint64_t end, uint64_t window)
{
    uint64_t first = start;
    for (uint64_t q = start; q < end; q++)
        first = attention_least(first, attention_from(q, (uint64_t)document_start[q], window));
    return first;
}

/* The keys of [key_start, key_end) that one query sees, relative to key_start: [from, to). Empty
 * ranges have from >= to. */
struct attention_range {
    uint64_t from, to;
};

static inline struct attention_range attention_visible(uint64_t query, uint64_t first_key,
                                                       uint64_t key_start, uint64_t key_end)
{
    uint64_t from = attention_most(first_key, key_start);
    uint64_t to = attention_least(query + 1, key_end);
    if (from >= to)
        return (struct attention_range){0, 0};
    return (struct attention_range){from - key_start, to - key_start};
}

#endif
