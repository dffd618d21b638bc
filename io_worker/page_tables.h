/*
 * The page tables in shared memory: which versions of the pages matter, and where they lie.
 *
 *     anchor      the newest commit all of whose pages were read back since its flush (slots.h)
 *     committed   the newest durable commit
 *     complete    the newest step whose pages are all written and hashed; what the next step
 *                 computes with, and what the run goes on from when a worker dies
 *     forming     the step being applied; it counts for nothing until it is complete
 *
 * Four places hold them, and several roles may lie in one place (right after a commit, committed
 * and complete). A change of roles is one new state, written into the older of two copies with its
 * own hash: whoever comes after this process finds either the old or the new assignment, and never
 * trusts the forming table. The state also carries what a commit of the complete step needs.
 */
#ifndef IO_WORKER_PAGE_TABLES_H
#define IO_WORKER_PAGE_TABLES_H

#include <stdint.h>

#include "io_worker/commit.h"
#include "ipc/page_table.h"

enum page_tables_role { TABLE_ANCHOR, TABLE_COMMITTED, TABLE_COMPLETE, TABLE_FORMING, TABLE_ROLES };

struct page_tables_state {
    uint64_t magic;
    uint64_t sequence; /* of states; the valid copy with the larger one counts */
    uint64_t n_pages;
    uint32_t place[TABLE_ROLES];
    uint64_t read_back;            /* 1: every page of the newest commit was read since its flush */
    uint64_t step[TABLE_ROLES];    /* that each table is of; forming: not used */
    struct page_digest state_hash; /* of the complete step */
    struct commit_facts facts;     /* likewise */
    uint64_t hash;                 /* xxh3-64 of everything before */
};
_Static_assert(sizeof(struct page_tables_state) <= PAGE_TABLE_STATE_BYTES, "fits its copy");

struct page_tables {
    unsigned char *memory;
    uint64_t n_pages;
    struct page_tables_state state;
    struct page_entry *anchor, *committed, *complete, *forming;
};

/* A new store or a recovered one: `complete` is to be filled by the caller, then
 * page_tables_start(). */
void page_tables_open(struct page_tables *tables, void *memory, uint64_t n_pages);

/* The entries in `complete` are a durable commit; all roles are this version. `read_back`: recovery
 * has read it; an import has only written it. */
void page_tables_start(struct page_tables *tables, const struct commit_facts *facts,
                       struct page_digest state_hash, int read_back);

/* Takes over what a predecessor left: `memory` may hold anything. 0, or ERROR_DAMAGED naming what
 * does not fit: both states, an entry of a table that counts, or the complete step's hash.
 * `slots_per_page` bounds the slots. */
int page_tables_adopt(struct page_tables *tables, void *memory, uint64_t n_pages,
                      unsigned slots_per_page);

/* Forming is complete; the next forming table starts as its copy. */
void page_tables_complete(struct page_tables *tables, const struct commit_facts *facts,
                          struct page_digest state_hash);
/* The complete version is durable. */
void page_tables_committed(struct page_tables *tables);
/* The committed version was read back. */
void page_tables_anchored(struct page_tables *tables);
/* The step being applied is given up. */
void page_tables_abandon(struct page_tables *tables);

#endif
