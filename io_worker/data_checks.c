#include "io_worker/data_checks.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "io_worker/data_source.h"
#include "procs/check.h"
#include "procs/error.h"

enum { HASHES_FIRST = 64 };

static void end_block(struct data_checks *c)
{
    if (c->n == c->capacity) {
        c->capacity = c->capacity ? 2 * c->capacity : HASHES_FIRST;
        c->hashes = realloc(c->hashes, c->capacity * sizeof *c->hashes);
        CHECK(c->hashes != NULL);
    }
    c->hashes[c->n++] = XXH3_64bits(c->block, c->used);
    c->used = 0;
}

void data_checks_feed(struct data_checks *c, const void *bytes, size_t n)
{
    const uint8_t *b = bytes;
    if (c->block == NULL)
        c->block = malloc(DATA_CHECK_BYTES);
    CHECK(c->block != NULL);
    while (n > 0) {
        size_t room = DATA_CHECK_BYTES - c->used, k = n < room ? n : room;
        memcpy(c->block + c->used, b, k);
        c->used += k;
        b += k;
        n -= k;
        if (c->used == DATA_CHECK_BYTES)
            end_block(c);
    }
}

void data_checks_end(struct data_checks *c)
{
    if (c->used > 0)
        end_block(c);
}

void data_checks_free(struct data_checks *c)
{
    free(c->hashes);
    free(c->block);
    *c = (struct data_checks){0};
}

/* Block `number`, compared. Returns its bytes, or negative. */
static int64_t read_block(const struct data_checked *f, uint64_t number, uint8_t *block)
{
    uint64_t start = number * DATA_CHECK_BYTES, left = f->bytes - start, expected;
    size_t n = left < DATA_CHECK_BYTES ? left : DATA_CHECK_BYTES;
    if (data_file_read(f->fd, f->path, block, n, f->base + start) < 0 ||
        data_file_read(f->checks_fd, f->checks_path, &expected, sizeof expected,
                       f->checks_offset + number * sizeof expected) < 0)
        return -(int)error_kind_now();
    uint64_t found = XXH3_64bits(block, n);
    if (found == expected)
        return (int64_t)n;
    (void)error_set(ERROR_FAILED,
                    "%s: damaged: bytes %" PRIu64 " to %" PRIu64 " have hash %016" PRIx64
                    ", expected %016" PRIx64 " (from %s)",
                    f->path, f->base + start, f->base + start + n, found, expected, f->checks_path);
    return error_hint("restore the file if it is yours; what lies in the cache may be removed: the "
                      "next start makes it again");
}

int data_checked_read(const struct data_checked *f, void *out, size_t n, uint64_t at)
{
    static uint8_t block[DATA_CHECK_BYTES]; /* one thread reads data */
    uint8_t *to = out;
    CHECK(at <= f->bytes && n <= f->bytes - at);
    while (n > 0) {
        int64_t got = read_block(f, at / DATA_CHECK_BYTES, block);
        if (got < 0)
            return (int)got;
        uint64_t skip = at % DATA_CHECK_BYTES;
        size_t k = n < (uint64_t)got - skip ? n : (uint64_t)got - skip;
        memcpy(to, block + skip, k);
        to += k;
        at += k;
        n -= k;
    }
    return 0;
}
