/*
 * How a superblock begins. io_worker writes superblocks (io_worker/store.h); `mtlaunch clean` reads
 * this much of one, to know whose files it is about to remove.
 */
#ifndef IPC_STORE_IDENTITY_H
#define IPC_STORE_IDENTITY_H

#include "ipc/page_image.h"

#include <stdint.h>

#define STORE_SUPERBLOCK_MAGIC 0x3152455055534d4dull /* "MMSUPER1" in memory */

enum { STORE_SUPERBLOCK_BYTES = 4096, STORE_SUPERBLOCK_COPIES = 2 };

struct store_identity {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t state;
    uint64_t generation;
    uint8_t run[RUN_UUID_BYTES];
};
_Static_assert(sizeof(struct store_identity) == 40, "no padding");

#endif
