/*
 * Which slot may be overwritten. Pure.
 *
 * Each page has three durable slots (two with verify_writes = false) for its versions. A new
 * version may go into any slot that no protected version lies in. Protected are the versions of the
 * page that
 *
 *     - the newest commit whose pages have ALL been read back since its flush names (the anchor),
 * and every later commit, complete or begun: if the newest turns out to be damaged by a write that
 *       the drive lost, the anchor is the commit to fall back to;
 *     - the newest complete step names: a worker's death falls back to it;
 *     - a pin names (an export or an evaluation that is still reading).
 *
 * Slots are never computed from the step: a skipped step writes nothing, and a page that a step did
 * not change is named by many commits in the same slot. With two slots (no read-back) the anchor is
 * the newest commit itself.
 */
#ifndef IO_WORKER_SLOTS_H
#define IO_WORKER_SLOTS_H

#include <stdint.h>

enum { SLOTS_MAX = 3 };

#define SLOT_NONE UINT32_MAX

/* Slots as bits: bit s is slot s. */
typedef uint32_t slot_mask;

/* The slots of ONE page that each of the following names; SLOT_NONE where there is none. */
struct slot_holders {
    uint32_t anchor;     /* newest commit all of whose pages were read back since its flush */
    uint32_t committed;  /* newest complete commit (announced or not) */
    uint32_t committing; /* the commit begun */
    uint32_t complete;   /* newest complete step */
    uint32_t forming;    /* a version of the step in progress, already written or being written */
    const uint32_t *between; /* slots named by commits between anchor and committed, if any */
    uint32_t n_between;
    const uint32_t *pinned;
    uint32_t n_pinned;
};

/* The slots that must not be overwritten. */
slot_mask slots_protected(const struct slot_holders *holders);

/* The lowest slot of `slots_per_page` that nothing protects, or SLOT_NONE: wait (a commit must
 * finish, a read-back must finish, a pin must go). Back-pressure, not an error. */
uint32_t slots_choose(const struct slot_holders *holders, uint32_t slots_per_page);

/*
 * The anchor advances when every page of a commit has been read back and compared since its flush:
 * one bit per page, counted, so that "all" is a comparison. The reads of the next apply mark pages
 * as they verify; pages that RAM held are read explicitly.
 */
struct readback {
    uint64_t *bits; /* caller's, readback_words(n_pages) words */
    uint64_t n_pages;
    uint64_t n_seen;
    uint64_t sequence; /* the commit being read back */
    int active;        /* 1: marks of `sequence` count; 0: no commit is being read back */
};

static inline uint64_t readback_words(uint64_t n_pages)
{
    return (n_pages + 63) / 64;
}

/* Starts over for a commit that has just been flushed and recorded. */
void readback_begin(struct readback *readback, uint64_t sequence);

/* `page` of commit `sequence` was read and its digests matched. Marks of another commit are
 * ignored. 1 when this was the last: the commit is the new anchor. */
int readback_mark(struct readback *readback, uint64_t sequence, uint64_t page);

/* First page at or after `from` that has not been read back; n_pages if there is none. */
uint64_t readback_next(const struct readback *readback, uint64_t from);

#endif
