/* What the data tests share: a directory that goes away, files in it, and one sample. */
#ifndef TESTS_IO_DATA_FIXTURE_H
#define TESTS_IO_DATA_FIXTURE_H

#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "io_worker/data.h"
#include "procs/error.h"

#define FIXTURE_SEQ_MAX 4096

static char fixture_directory[64];
static int32_t fixture_tokens[FIXTURE_SEQ_MAX], fixture_labels[FIXTURE_SEQ_MAX],
    fixture_position[FIXTURE_SEQ_MAX], fixture_start[FIXTURE_SEQ_MAX];
static struct data_sample sample = {fixture_tokens, fixture_labels, fixture_position,
                                    fixture_start};

static int fixture_remove(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s;
    (void)type;
    (void)f;
    return remove(path);
}

static int fixture_setup(void **state)
{
    (void)state;
    strcpy(fixture_directory, "/tmp/test_data_XXXXXX");
    return mkdtemp(fixture_directory) ? 0 : -1;
}

static int fixture_teardown(void **state)
{
    (void)state;
    return nftw(fixture_directory, fixture_remove, 8, FTW_DEPTH | FTW_PHYS);
}

/* Writes a file and returns its path, which lives until the 16th call after this. */
static const char *fixture_write(const char *name, const void *bytes, size_t n)
{
    static char paths[16][256];
    static unsigned next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", fixture_directory, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
    return path;
}

static inline const char *fixture_text(const char *name, const char *text)
{
    return fixture_write(name, text, strlen(text));
}

static inline struct data_config fixture_config(const char *const *train, size_t n)
{
    static char cache[128];
    snprintf(cache, sizeof cache, "%s/cache/deep", fixture_directory);
    return (struct data_config){.train = train,
                                .n_train = n,
                                .packing = true,
                                .cache_dir = cache,
                                .seq_len = 8,
                                .vocab_size = 300,
                                .eos_id = DATA_NO_EOS,
                                .seed = 7};
}

static inline struct data *fixture_open(const struct data_config *c)
{
    struct data *d = NULL;
    if (data_open(&d, c, NULL, NULL) < 0)
        fail_msg("%s", error_text());
    return d;
}

/* Opening must fail with this kind, and the message must contain both texts. */
static inline void fixture_refused(const struct data_config *c, enum error_kind kind, const char *a,
                                   const char *b)
{
    struct data *d = NULL;
    int rc = data_open(&d, c, NULL, NULL);
    assert_int_equal(rc, -(int)kind);
    if (strstr(error_text(), a) == NULL || strstr(error_text(), b) == NULL)
        fail_msg("expected \"%s\" and \"%s\" in: %s", a, b, error_text());
}

static inline void fixture_read(struct data *d, enum data_set set, uint64_t q)
{
    if (data_read_sample(d, set, q, &sample) < 0)
        fail_msg("%s", error_text());
}

#define EXPECT_ROW(array, ...)                                                                     \
    do {                                                                                           \
        const int32_t row[] = {__VA_ARGS__};                                                       \
        for (size_t i = 0; i < sizeof row / sizeof row[0]; i++)                                    \
            if (array[i] != row[i])                                                                \
                fail_msg(#array "[%zu]: expected %d, found %d", i, row[i], array[i]);              \
    } while (0)

#endif
