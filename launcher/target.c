#include "launcher/target.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/command.h"
#include "launcher/plan_build.h"
#include "launcher/progress.h"
#include "launcher/run_dir.h"
#include "launcher/tokenizing.h"
#include "procs/error.h"

static int file_exists(const char *directory, const char *name)
{
    char path[LAUNCHER_PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/%s", directory, name);
    return n > 0 && n < (int)sizeof path && access(path, R_OK) == 0;
}

static int replace(char **text, const char *value)
{
    free(*text);
    *text = strdup(value);
    return *text ? 0 : error_set(ERROR_FAILED, "out of memory");
}

/* Token shards need no tokenizer, so none is assumed that the vocabulary may be too small for. */
static int is_shard(const char *data)
{
    size_t n = data ? strlen(data) : 0;
    return n >= 4 && strcmp(data + n - 4, ".bin") == 0;
}

/* A Hugging Face folder has no run file: the defaults, with what the folder says. */
static int folder_config(struct launcher *l, const char *folder, const char *data)
{
    struct model_config model;
    char path[LAUNCHER_PATH_BYTES + 32], train[LAUNCHER_PATH_BYTES + 32], dtype[64], tokenizer[64],
        seq[64];
    if (model_config_load(&model, folder) < 0)
        return -(int)error_kind_now();
    (void)snprintf(path, sizeof path, "--model.path=%s", folder);
    (void)snprintf(train, sizeof train, "--data.train=%s", data ? data : "/dev/null");
    (void)snprintf(dtype, sizeof dtype, "--model.dtype=%s",
                   model.source_dtype == DTYPE_BF16 ? "bfloat16" : "float32");
    (void)snprintf(tokenizer, sizeof tokenizer, "--model.tokenizer=%s",
                   file_exists(folder, "tokenizer.json") || is_shard(data) ? "" : "bytes");
    (void)snprintf(seq, sizeof seq, "--training.seq_len=1024");
    char *overrides[] = {path, train, dtype, tokenizer, seq, "--memory.offload_dir=/nonexistent"};
    return config_load(&l->config, "/dev/null", overrides, sizeof overrides / sizeof *overrides);
}

static int read_target(struct target *t, struct launcher *l, const char *path, const char *data)
{
    if (!t->is_run)
        return folder_config(l, path, data);
    if (run_dir_open(&l->run, path, RUN_DIR_EXISTING) < 0 ||
        run_dir_read_config(path, &l->config) < 0 ||
        run_dir_lock_stores(&l->run, &l->config, RUN_DIR_EXISTING) < 0)
        return -(int)error_kind_now();
    if (!data)
        return 0;
    for (size_t i = 1; i < l->config.data_train.count; i++)
        free(l->config.data_train.items[i]);
    l->config.data_train.count = 1;
    l->config.data_format = CONFIG_FORMAT_AUTO;
    return replace(&l->config.data_train.items[0], data);
}

int target_open(struct target *t, struct launcher *l, const char *path, const char *data)
{
    char real[PATH_MAX], data_real[PATH_MAX];
    if (!realpath(path, real))
        return error_set(ERROR_USER, "%s: %s", path, strerror(errno));
    if (data && !realpath(data, data_real))
        return error_set(ERROR_USER, "%s: %s", data, strerror(errno));
    t->is_run = file_exists(real, "run.id");
    if (!t->is_run && !file_exists(real, "config.json"))
        return error_set(
            ERROR_USER,
            "%s: neither a run directory (run.id) nor a Hugging Face folder (config.json)", path);
    if (scratch_make(&t->scratch) < 0)
        return -(int)error_kind_now();
    if (read_target(t, l, real, data ? data_real : NULL) < 0 ||
        replace(&l->config.data_cache_dir, t->scratch.path) < 0 ||
        plan_load_model(&l->config, &l->layout) < 0)
        return -(int)error_kind_now();
    return 0;
}

int target_run(struct target *t, struct launcher *l, struct supervisor_job *job)
{
    job->request.weights_from_store = t->is_run;
    int rc = progress_open(&l->progress, CONFIG_PROGRESS_NONE, 1);
    if (rc == 0)
        rc = supervisor_open_signals(l);
    if (rc == 0 && job->request.mode == PLAN_EVALUATE)
        rc = tokenizing_run(l, NULL);
    return rc == 0 ? supervisor_run(l, job) : rc;
}

int target_close(struct target *t, struct launcher *l, int rc)
{
    int status = rc < 0 ? command_fail() : 0;
    progress_close(l->progress);
    run_dir_close(&l->run);
    model_layout_destroy(&l->layout);
    tokenizing_close(l);
    config_destroy(&l->config);
    if (l->signal_fd >= 0)
        (void)close(l->signal_fd);
    scratch_remove(&t->scratch);
    return status;
}
