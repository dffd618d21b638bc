/*
 * What the fuzz targets share: oracles, reading of inputs, files, small mutations.
 *
 * A target is one file fuzz_<name>.c with LLVMFuzzerTestOneInput(). It feeds the input to the real
 * functions and checks more than that nothing crashes:
 *
 *     int rc = thing_decode(bytes, n, &thing);
 *     if (rc < 0)
 *         fuzz_refused(rc, FUZZ_USER);           // an error text, the right kind
 *     else
 *         REQUIRE(thing_encode(&thing) ...);     // what was accepted means the same once more
 *
 * Where a checksum stands before the interesting code, LLVMFuzzerCustomMutator() makes it right
 * again after most mutations, so that what lies behind is reached.
 */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "procs/error.h"

/* libFuzzer's face. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

/* -- oracles -- */

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fuzz_violated(__FILE__, __LINE__, #condition);                                         \
    } while (0)

static inline _Noreturn void fuzz_violated(const char *file, int line, const char *condition)
{
    (void)fprintf(stderr, "%s:%d: oracle violated: %s\n  last error: %s\n", file, line, condition,
                  error_text());
    abort();
}

enum {
    FUZZ_FAILED = 1 << ERROR_FAILED,
    FUZZ_USER = 1 << ERROR_USER,
    FUZZ_FIT = 1 << ERROR_FIT,
    FUZZ_DAMAGED = 1 << ERROR_DAMAGED,
};

/* A refusal is an error of one of these kinds with a text; error_clear() went before the call. */
static inline void fuzz_refused(int rc, unsigned kinds)
{
    REQUIRE(rc < 0 && rc == -(int)error_kind_now());
    REQUIRE((kinds >> -rc & 1) == 1);
    REQUIRE(error_text()[0] != '\0');
}

/* -- inputs: past the end there are zeros -- */

struct fuzz_input {
    const uint8_t *bytes;
    size_t left;
};

static inline void fuzz_take(struct fuzz_input *in, void *out, size_t n)
{
    size_t there = n < in->left ? n : in->left;
    memset(out, 0, n);
    if (there > 0)
        memcpy(out, in->bytes, there);
    in->bytes += there;
    in->left -= there;
}

static inline uint8_t fuzz_u8(struct fuzz_input *in)
{
    uint8_t x;
    fuzz_take(in, &x, sizeof x);
    return x;
}

static inline uint32_t fuzz_u32(struct fuzz_input *in)
{
    uint32_t x;
    fuzz_take(in, &x, sizeof x);
    return x;
}

static inline uint64_t fuzz_u64(struct fuzz_input *in)
{
    uint64_t x;
    fuzz_take(in, &x, sizeof x);
    return x;
}

/* -- damage: an input as a list of small changes to something whole -- */

/* What a change does and where is the target's; twelve bytes each, so that libFuzzer's own
 * mutations shift and splice whole ones. */
struct fuzz_op {
    uint8_t what;
    uint8_t extent; /* low three bits: bytes of value that count, less one; the others: which one */
    uint16_t at;
    uint8_t value[8];
};
_Static_assert(sizeof(struct fuzz_op) == 12, "no padding: it is part of the inputs");

enum { FUZZ_OPS_MAX = 24 };

static inline int fuzz_next_op(struct fuzz_input *in, struct fuzz_op *op)
{
    if (in->left < sizeof *op)
        return 0;
    fuzz_take(in, op, sizeof *op);
    return 1;
}

static inline size_t fuzz_op_bytes(const struct fuzz_op *op)
{
    return 1 + (op->extent & 7u);
}

static inline unsigned fuzz_op_which(const struct fuzz_op *op)
{
    return op->extent >> 3;
}

static inline uint64_t fuzz_op_value(const struct fuzz_op *op)
{
    uint64_t x;
    memcpy(&x, op->value, sizeof x);
    return x;
}

/* Writes the value's bytes into [0, size) at `at`, as far as they fit. */
static inline void fuzz_op_write(const struct fuzz_op *op, void *to, size_t size, size_t at)
{
    for (size_t i = 0; i < fuzz_op_bytes(op) && at + i < size; i++)
        ((uint8_t *)to)[at + i] = op->value[i];
}

/* -- randomness for mutators (splitmix64) -- */

static inline uint64_t fuzz_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t fuzz_below(uint64_t *state, uint64_t n)
{
    return fuzz_random(state) % n;
}

/* Numbers at which arithmetic turns. */
static inline uint64_t fuzz_number(uint64_t *state)
{
    uint64_t x = (uint64_t)1 << fuzz_below(state, 64);
    switch (fuzz_below(state, 6)) {
    case 0:
        return fuzz_below(state, 8);
    case 1:
        return x;
    case 2:
        return x - 1;
    case 3:
        return 0 - x;
    case 4:
        return x + fuzz_below(state, 4);
    default:
        return fuzz_random(state);
    }
}

/*
 * A mutation of `head` bytes followed by changes: libFuzzer's own on the raw bytes, or a change is
 * added at one of the places of interest, or one is taken away.
 */
struct fuzz_place {
    uint8_t what;
    uint16_t at;
    uint8_t bytes; /* 1 .. 8 */
};

static inline size_t fuzz_mutate_ops(uint8_t *data, size_t size, size_t max_size, size_t head,
                                     uint64_t *random, const struct fuzz_place *places, size_t n)
{
    size_t ops = size > head ? (size - head) / sizeof(struct fuzz_op) : 0;
    if (size < head) {
        memset(data + size, 0, head - size);
        size = head;
    }
    uint64_t turn = fuzz_below(random, 8);
    if (turn >= 3 && ops < FUZZ_OPS_MAX && head + (ops + 1) * sizeof(struct fuzz_op) <= max_size) {
        const struct fuzz_place *place = &places[fuzz_below(random, n)];
        struct fuzz_op op = {.what = place->what, .at = place->at};
        op.extent = (uint8_t)(place->bytes - 1);
        uint64_t value = fuzz_number(random);
        memcpy(op.value, &value, sizeof value);
        memcpy(data + head + ops * sizeof op, &op, sizeof op);
        return head + (ops + 1) * sizeof op;
    }
    if (turn == 2 && ops > 0) {
        size_t gone = fuzz_below(random, ops);
        uint8_t *at = data + head + gone * sizeof(struct fuzz_op);
        memmove(at, at + sizeof(struct fuzz_op), (ops - gone - 1) * sizeof(struct fuzz_op));
        return head + (ops - 1) * sizeof(struct fuzz_op);
    }
    return LLVMFuzzerMutate(data, size, max_size);
}

/* -- files: below FUZZ_DIRECTORY, which tests/fuzz/fuzz.py makes and removes -- */

static inline const char *fuzz_directory(void)
{
    const char *directory = getenv("FUZZ_DIRECTORY");
    if (directory == NULL) {
        (void)fprintf(stderr, "FUZZ_DIRECTORY: expected a private directory, found nothing\n");
        exit(2);
    }
    return directory;
}

static inline void fuzz_path(char *path, size_t capacity, const char *name)
{
    int n = snprintf(path, capacity, "%s/%s", fuzz_directory(), name);
    REQUIRE(n > 0 && (size_t)n < capacity);
}

static inline void fuzz_write_file(const char *path, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    REQUIRE(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
    REQUIRE(close(fd) == 0);
}

#endif
