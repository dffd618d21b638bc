/*
 * safetensors against the reference library: the verdict on several hundred small files, right and
 * wrong, and what the right ones hold (tools/goldens/safetensors_corpus.py; case C32). An argument
 * is another corpus.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/safetensors.h"
#include "procs/error.h"

#define CORPUS "tests/goldens/safetensors/corpus.txt"

enum { CASES_MIN = 400, LINE_BYTES = 16384 };

struct corpus_case {
    char name[64], verdict[16], meaning[64];
    unsigned char bytes[LINE_BYTES / 2];
    size_t n;
};

static char path[64];
static const char *corpus_path = CORPUS;

/* NAME VERDICT MEANING HEX; HEX is absent for an empty file. */
static int parse_line(struct corpus_case *c, const char *line)
{
    int at = 0;
    if (sscanf(line, "%63s %15s %63s %n", c->name, c->verdict, c->meaning, &at) != 3)
        return -1;
    c->n = 0;
    for (unsigned byte; sscanf(line + at, "%2x", &byte) == 1; at += 2)
        c->bytes[c->n++] = (unsigned char)byte;
    return line[at] == '\n' || line[at] == '\0' ? 0 : -1;
}

static void write_case(const struct corpus_case *c)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(c->bytes, 1, c->n, f), c->n);
    assert_int_equal(fclose(f), 0);
}

static uint64_t fnv(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

/* meaning() of the generator: names' order is strcmp's. */
static uint64_t meaning_of(const struct safetensors *st)
{
    static unsigned char data[LINE_BYTES];
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint64_t i = 0; i < safetensors_n_tensors(st); i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(st, i);
        const char *dtype = model_dtype_name(t->dtype);
        assert_true(t->bytes <= sizeof data);
        assert_int_equal(safetensors_read_raw(st, t, 0, t->elements, data), 0);
        hash = fnv(hash, t->name, strlen(t->name) + 1);
        hash = fnv(hash, dtype, strlen(dtype) + 1);
        hash = fnv(hash, t->shape, t->n_dims * sizeof t->shape[0]);
        hash = fnv(hash, data, t->bytes);
    }
    return hash;
}

/* Spaces of a message are underscores in the corpus. */
static int says(const char *text, const char *words)
{
    char copy[2048];
    (void)snprintf(copy, sizeof copy, "%s", text);
    for (char *p = copy; *p; p++)
        if (*p == ' ')
            *p = '_';
    return strstr(copy, words) != NULL;
}

static void check_accepted(const struct corpus_case *c)
{
    struct safetensors *st;
    char hash[32];
    int rc = safetensors_open_file(&st, path);
    if (rc < 0)
        fail_msg("%s: %s, we said: %s", c->name, c->verdict, error_text());
    (void)snprintf(hash, sizeof hash, "%016llx", (unsigned long long)meaning_of(st));
    if (strcmp(c->verdict, "accept") == 0 && strcmp(hash, c->meaning) != 0)
        fail_msg("%s: holds %s, for the library %s", c->name, hash, c->meaning);
    safetensors_close(st);
}

static void check_refused(const struct corpus_case *c, const char *words)
{
    struct safetensors *st = NULL;
    int rc = safetensors_open_file(&st, path);
    if (rc != -ERROR_USER || st != NULL || !strstr(error_text(), path) ||
        !says(error_text(), words))
        fail_msg("%s: expected a refusal that says \"%s\", got %d: %s", c->name, words, rc,
                 rc < 0 ? error_text() : "accepted");
}

static void every_verdict_is_that_of_the_reference_library(void **state)
{
    (void)state;
    static struct corpus_case c;
    static char line[LINE_BYTES];
    unsigned accepted = 0, refused = 0, stricter = 0;
    FILE *corpus = fopen(corpus_path, "r");
    assert_non_null(corpus);
    (void)snprintf(path, sizeof path, "/tmp/safetensors_reference_%ld", (long)getpid());
    while (fgets(line, sizeof line, corpus)) {
        if (parse_line(&c, line) < 0)
            fail_msg("%s: cannot be parsed: %.60s", corpus_path, line);
        write_case(&c);
        error_clear();
        if (strcmp(c.verdict, "accept") == 0 || strcmp(c.verdict, "looser") == 0)
            check_accepted(&c), accepted++;
        else if (strcmp(c.verdict, "refuse") == 0)
            check_refused(&c, ""), refused++;
        else
            check_refused(&c, c.meaning), stricter++;
    }
    assert_int_equal(fclose(corpus), 0);
    assert_int_equal(unlink(path), 0);
    print_message("# %u accepted, %u refused, %u refused by us alone\n", accepted, refused,
                  stricter);
    assert_true(accepted > 80 && refused > 300 && stricter > 0);
    assert_true(accepted + refused + stricter >= CASES_MIN);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        corpus_path = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_verdict_is_that_of_the_reference_library),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
