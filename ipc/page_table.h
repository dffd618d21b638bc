/*
 * The page table: for every page, where each version that matters is durable. Written by io_worker
 * alone, in shared memory so that it survives io_worker's death; every entry carries its own hash,
 * and so does the state that says which table is which.
 *
 *     state[2]     io_worker's struct page_tables_state (io_worker/page_tables.h), written in turn
 *     table[4]     n_pages entries each, io_worker's struct page_entry (io_worker/commit.h)
 */
#ifndef IPC_PAGE_TABLE_H
#define IPC_PAGE_TABLE_H

#include <stdint.h>

enum {
    PAGE_TABLE_STATES = 2,
    PAGE_TABLE_STATE_BYTES = 4096,
    PAGE_TABLE_PLACES = 4,
    PAGE_TABLE_ENTRY_BYTES = 128,
};

static inline uint64_t page_table_bytes(uint64_t n_pages)
{
    return PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES +
           PAGE_TABLE_PLACES * n_pages * PAGE_TABLE_ENTRY_BYTES;
}

#endif
