/*
 * Recovers stores as io_worker would at its start, thousands in a few seconds: for power_cut.py.
 *
 *     recover MODEL_FOLDER PAGE_ELEMENTS float32|bfloat16 SLOTS RUN_ID_HEX DIRECTORY...
 *
 * For each line on standard input it opens the store that now lies in the directories, recovers,
 * and prints one line:
 *
 *     commit STEP STATE_HASH FELL_BACK     what recovery found, every byte verified
 *     none STATE                           no store that was ever READY: the run begins anew
 *     error TEXT
 *
 * It writes nothing.
 */
#include "io_worker/store.h"
#include "model/config.h"
#include "procs/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIXED_ARGUMENTS = 6 };

static void answer(const struct store_options *options)
{
    struct store *store = NULL;
    struct commit_record record;
    uint64_t fell_back = 0;
    char hash[33];
    struct page_entry *table = calloc(options->layout->n_pages, sizeof *table);
    int rc = table ? store_open(&store, options) : error_set(ERROR_FAILED, "out of memory");
    if (rc == 0 && store_state_now(store) != STORE_READY) {
        (void)printf("none %s\n", store_state_name(store_state_now(store)));
        rc = 1;
    }
    if (rc == 0)
        rc = store_recover(store, &record, table, &fell_back);
    if (rc == 0) {
        page_digest_format(record.state_hash, hash);
        (void)printf("commit %llu %s %llu\n", (unsigned long long)record.facts.step, hash,
                     (unsigned long long)fell_back);
    } else if (rc < 0) {
        (void)printf("error ");
        for (const char *c = error_text(); *c; c++)
            (void)putchar(*c == '\n' ? ' ' : *c);
        (void)putchar('\n');
    }
    store_close(store);
    free(table);
}

static int parse_run(const char *text, uint8_t run[RUN_UUID_BYTES])
{
    for (int i = 0; i < RUN_UUID_BYTES; i++) {
        unsigned value;
        if (sscanf(text + 2 * i, "%2x", &value) != 1)
            return error_set(ERROR_USER, "%s: expected 32 hexadecimal digits", text);
        run[i] = (uint8_t)value;
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct model_config config;
    struct model_layout layout;
    char line[16];
    if (argc <= FIXED_ARGUMENTS)
        return 2;
    struct store_options options = {.directories = (const char *const *)argv + FIXED_ARGUMENTS,
                                    .n_directories = (unsigned)(argc - FIXED_ARGUMENTS),
                                    .layout = &layout,
                                    .dtype = strcmp(argv[3], "bfloat16") == 0 ? DTYPE_BFLOAT16
                                                                              : DTYPE_FLOAT32,
                                    .slots_per_page = (unsigned)atoi(argv[4]),
                                    .engine = ENGINE_SYNC,
                                    .engine_depth = 4,
                                    .lock_timeout_s = 1};
    if (model_config_load(&config, argv[1]) < 0 ||
        model_layout_init(&layout, &config, strtoull(argv[2], NULL, 10)) < 0 ||
        parse_run(argv[5], options.run) < 0) {
        (void)fprintf(stderr, "%s\n", error_text());
        return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        answer(&options);
        (void)fflush(stdout);
    }
    model_layout_destroy(&layout);
    return 0;
}
