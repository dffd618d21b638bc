/* `mtlaunch tokenize RUN.toml`: the part of a start that makes token files, by itself. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launcher/command.h"
#include "launcher/plan_build.h"
#include "launcher/progress.h"
#include "launcher/run_dir.h"
#include "launcher/supervisor.h"
#include "launcher/tokenizing.h"
#include "procs/error.h"

static int read_run_file(struct launcher *l, const struct arguments *a)
{
    if (a->count < 1)
        return error_set(ERROR_USER, "expected a run file");
    if (config_load(&l->config, a->items[0], a->items + 1, (size_t)(a->count - 1)) < 0 ||
        config_refuse_missing(&l->config) < 0 || plan_load_model(&l->config, &l->layout) < 0)
        return -(int)error_kind_now();
    if (strcmp(l->config.model_tokenizer, "bytes") != 0)
        return 0;
    (void)error_set(ERROR_USER, "tokenize: [model] tokenizer is \"bytes\"");
    return error_hint("there is nothing to do beforehand: bytes are their own tokens");
}

/* The default cache lies in the run directory, which is made, and locked, as a run does it. */
static int tokenize(struct launcher *l)
{
    if (*l->config.data_cache_dir)
        return tokenizing_run(l, NULL);
    if (run_dir_open(&l->run, l->config.run_output_dir, RUN_DIR_CREATE) < 0)
        return -(int)error_kind_now();
    int rc = tokenizing_run(l, NULL);
    if (rc == -ERROR_USER || rc == -ERROR_FIT)
        run_dir_undo(&l->run);
    run_dir_close(&l->run);
    return rc;
}

int command_tokenize(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    int rc = read_run_file(&l, a);
    if (rc == 0)
        rc = progress_open(&l.progress, l.config.log_progress, l.config.log_interval);
    if (rc == 0)
        rc = supervisor_open_signals(&l);
    if (rc == 0)
        rc = tokenize(&l);
    progress_close(l.progress); /* ends the bar's line before an error is told */
    if (rc == 0)
        tokenizing_print(&l);
    int status = rc < 0 ? command_fail() : 0;
    model_layout_destroy(&l.layout);
    tokenizing_close(&l);
    config_destroy(&l.config);
    if (l.signal_fd >= 0)
        (void)close(l.signal_fd);
    return status;
}
