#include "launcher/command.h"
#include "launcher/limits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "procs/error.h"
#include "procs/printable.h"

static const struct row {
    const char *name, *usage, *text;
    int (*run)(const struct arguments *);
} rows[] = {
    {"run", "RUN.toml [--section.key=value ...]", "train; `run` may be left out", command_train},
    {"tokenize", "RUN.toml [--section.key=value ...]",
     "make the token files of the run's text, train nothing", command_tokenize},
    {"validate", "RUN.toml [--section.key=value ...]", "check everything, train nothing",
     command_validate},
    {"export", "RUN_DIR OUT_DIR [--dtype float32|bfloat16|float16]",
     "a Hugging Face folder of the newest commit", command_export},
    {"generate",
     "RUN_DIR|HF_DIR --prompt TEXT [--max-new-tokens N --temperature T --top-p P --seed S]",
     "continue a text (temperature 0: greedy)", command_generate},
    {"eval", "RUN_DIR|HF_DIR --data FILE [--seq-len N]", "tokens, loss and perplexity",
     command_eval},
    {"digest", "RUN_DIR", "hashes recomputed from the bytes on disk", command_digest},
    {"scrub", "RUN_DIR", "verify every byte of the store and the metrics, write nothing",
     command_scrub},
    {"stop", "RUN_DIR", "finish the step, commit it, stop", command_stop},
    {"clean", "RUN_DIR", "free the store; exports, metrics and logs stay", command_clean},
};
enum { ROWS = sizeof rows / sizeof *rows };

static int help(void)
{
    (void)printf(
        "mtlaunch %s: trains language models larger than GPU memory and RAM, on one machine\n\n",
        MTLAUNCH_VERSION);
    for (int i = 0; i < ROWS; i++)
        (void)printf("  mtlaunch %-9s %s\n                     %s\n", rows[i].name, rows[i].usage,
                     rows[i].text);
    (void)printf("  mtlaunch help | --version\n\n"
                 "exit status: 0 done, 1 failed, 2 something you supplied, 3 does not fit,\n"
                 "             4 stopped and resumable, 5 the run is in use\n");
    return 0;
}

int command_fail(void)
{
    if (*error_text()) {
        (void)fputs("mtlaunch: ", stderr);
        printable_put(error_text(), stderr); /* it may quote file names */
        (void)fputc('\n', stderr);
    }
    return (int)error_kind_now();
}

static int ends_in_toml(const char *text)
{
    size_t n = strlen(text);
    return n > 5 && strcmp(text + n - 5, ".toml") == 0;
}

int command_main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "help";
    if (strcmp(name, "--version") == 0) {
        (void)printf("mtlaunch %s\n", MTLAUNCH_VERSION);
        return 0;
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return argc > 1 ? help() : (help(), ERROR_USER);
    struct arguments a = {argc - 2, argv + 2};
    if (limits_open() < 0)
        return command_fail();
    for (int i = 0; i < ROWS; i++)
        if (strcmp(name, rows[i].name) == 0)
            return rows[i].run(&a);
    struct arguments whole = {argc - 1, argv + 1};
    if (ends_in_toml(name))
        return command_train(&whole);
    (void)error_set(ERROR_USER, "%s: neither a command nor a .toml file", name);
    (void)error_hint("`mtlaunch help` lists the commands");
    return command_fail();
}

/* -- options of commands -- */

int options_open(struct options *o, const struct arguments *a)
{
    memset(o, 0, sizeof *o);
    o->a = a;
    if (a->count > (int)sizeof o->taken)
        return error_set(ERROR_USER, "%d arguments: at most %zu are expected", a->count,
                         sizeof o->taken);
    return 0;
}

const char *options_value(struct options *o, const char *name)
{
    size_t n = strlen(name);
    for (int i = 0; i < o->a->count; i++) {
        const char *item = o->a->items[i];
        if (o->taken[i] || strncmp(item, "--", 2) != 0 || strncmp(item + 2, name, n) != 0)
            continue;
        if (item[2 + n] == '=') {
            o->taken[i] = 1;
            return item + 3 + n;
        }
        if (item[2 + n] == '\0' && i + 1 < o->a->count) {
            o->taken[i] = o->taken[i + 1] = 1;
            return o->a->items[i + 1];
        }
    }
    return NULL;
}

int options_u64(struct options *o, const char *name, unsigned long long fallback,
                unsigned long long *out)
{
    const char *text = options_value(o, name);
    char *end = NULL;
    *out = fallback;
    if (!text)
        return 0;
    errno = 0;
    *out = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-')
        return error_set(ERROR_USER, "--%s: expected a number, found \"%s\"", name, text);
    return 0;
}

int options_double(struct options *o, const char *name, double fallback, double *out)
{
    const char *text = options_value(o, name);
    char *end = NULL;
    *out = fallback;
    if (!text)
        return 0;
    *out = strtod(text, &end);
    if (end == text || *end || !(*out >= 0.0) || *out > 1e9)
        return error_set(ERROR_USER, "--%s: expected a number of at least 0, found \"%s\"", name,
                         text);
    return 0;
}

const char *options_positional(struct options *o)
{
    for (int i = 0; i < o->a->count; i++)
        if (!o->taken[i] && strncmp(o->a->items[i], "--", 2) != 0) {
            o->taken[i] = 1;
            return o->a->items[i];
        }
    return NULL;
}

int options_only(const struct arguments *a, const char *usage, const char **path)
{
    struct options o;
    if (options_open(&o, a) < 0)
        return -(int)error_kind_now();
    *path = options_positional(&o);
    if (!*path)
        return error_set(ERROR_USER, "expected %s", usage);
    return options_close(&o);
}

int options_close(struct options *o)
{
    for (int i = 0; i < o->a->count; i++)
        if (!o->taken[i]) {
            (void)error_set(ERROR_USER, "unexpected argument \"%s\"", o->a->items[i]);
            return error_hint("`mtlaunch help` lists the commands and their options");
        }
    return 0;
}
