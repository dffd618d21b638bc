/*
 * A hash for each DATA_CHECK_BYTES of what a data set is read from, tokens or entries of an index:
 * taken where they are written or, in a shard, where they are read for the first time, compared at
 * every read after that. A bit that changed in between, whoever changed it, is never trained on.
 *
 *      checked file | base |  64 KiB  |  64 KiB  |  64 KiB  | rest |
 *      checks                h0          h1         h2         h3        u64 each, xxh3-64
 *
 * The checks are the end of a cache file (data_cache.h): of the tokenized text or the index in it,
 * or of the shard that it describes.
 */
#ifndef IO_WORKER_DATA_CHECKS_H
#define IO_WORKER_DATA_CHECKS_H

#include <stddef.h>
#include <stdint.h>

#define DATA_CHECK_BYTES ((uint64_t)1 << 16)

/* Hashes being taken, front to back; a zeroed one is fine. 8 bytes of memory for each block. */
struct data_checks {
    uint64_t *hashes, n, capacity;
    uint64_t used; /* bytes of the block that is not full */
    uint8_t *block;
};

void data_checks_feed(struct data_checks *c, const void *bytes, size_t n);
/* The block that is not full counts, too. */
void data_checks_end(struct data_checks *c);
void data_checks_free(struct data_checks *c);

/* How many there are of so many bytes. */
static inline uint64_t data_checks_count(uint64_t bytes)
{
    return bytes / DATA_CHECK_BYTES + (bytes % DATA_CHECK_BYTES != 0);
}

struct data_checked {
    const char *path;
    int fd;
    uint64_t base, bytes; /* what is covered: bytes [base, base + bytes) of the file */
    const char *checks_path;
    int checks_fd;
    uint64_t checks_offset;
};

/*
 * Reads bytes [at, at + n) of what is covered; whole blocks are read and compared. -ERROR_FAILED:
 * I/O errors, a file that was cut, a block that is not what it was (path, offsets, hashes).
 */
int data_checked_read(const struct data_checked *f, void *out, size_t n, uint64_t at);

#endif
