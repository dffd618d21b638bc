/*
 * The page table: for every page, where each version that matters is durable. Written by io_worker
 * alone, in shared memory so that it survives io_worker's death; every entry carries its own hash.
 *
 *     entries[PAGE_TABLE_ANCHOR]     newest commit all of whose pages were read back since its
 * flush entries[PAGE_TABLE_COMMITTED]  newest durable commit entries[PAGE_TABLE_FORMING]    the
 * step being applied; equal to COMMITTED between steps
 *
 * An entry is io_worker's struct page_entry (io_worker/commit.h), PAGE_TABLE_ENTRY_BYTES each.
 */
#ifndef IPC_PAGE_TABLE_H
#define IPC_PAGE_TABLE_H

#include <stdint.h>

enum page_table_kind {
    PAGE_TABLE_ANCHOR,
    PAGE_TABLE_COMMITTED,
    PAGE_TABLE_FORMING,
    PAGE_TABLE_COUNT
};

enum { PAGE_TABLE_ENTRY_BYTES = 128 };

static inline uint64_t page_table_bytes(uint64_t n_pages)
{
    return PAGE_TABLE_COUNT * n_pages * PAGE_TABLE_ENTRY_BYTES;
}

#endif
