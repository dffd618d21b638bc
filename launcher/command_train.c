/* `mtlaunch RUN.toml` and `mtlaunch validate RUN.toml`. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher/cgroup.h"
#include "launcher/command.h"
#include "launcher/coordinator.h"
#include "launcher/metrics.h"
#include "launcher/plan_build.h"
#include "launcher/progress.h"
#include "launcher/prompts.h"
#include "launcher/run_dir.h"
#include "launcher/scratch.h"
#include "launcher/supervisor.h"
#include "launcher/tokenizing.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/log.h"
#include "procs/printable.h"

/* Everything that can be known to be wrong without writing a byte. */
static int read_inputs(struct launcher *l, const struct arguments *a)
{
    if (a->count < 1)
        return error_set(ERROR_USER, "expected a run file");
    if (config_load(&l->config, a->items[0], a->items + 1, (size_t)(a->count - 1)) < 0 ||
        config_refuse_missing(&l->config) < 0 || plan_load_model(&l->config, &l->layout) < 0)
        return -(int)error_kind_now();
    return 0;
}

static void close_all(struct launcher *l)
{
    coordinator_end(l);
    metrics_close(l->metrics);
    progress_close(l->progress);
    model_layout_destroy(&l->layout);
    tokenizing_close(l);
    config_destroy(&l->config);
    if (l->signal_fd >= 0)
        (void)close(l->signal_fd);
}

/* The plan is built once before the run directory exists, so that what does not fit writes nothing.
 */
static int preflight(struct launcher *l, const struct plan_request *request)
{
    struct plan *plan = NULL;
    int rc = plan_build(&plan, l, request);
    free(plan);
    return rc;
}

static void tell_end(struct launcher *l)
{
    uint64_t committed = coordinator_committed(l);
    progress_say(l->progress,
                 committed >= l->coordinator.steps
                     ? "done: step %llu of %llu; the model is in %s/export/step-%llu"
                     : "stopped after step %llu of %llu; start again to resume (%s, step %llu)",
                 (unsigned long long)committed, (unsigned long long)l->coordinator.steps,
                 l->run.path, (unsigned long long)committed);
    l->finished = committed >= l->coordinator.steps;
}

/* The launcher's own log: what it found and did to processes. One that cannot be kept stops
 * nothing.
 */
static void open_log(const struct launcher *l)
{
    char path[LAUNCHER_PATH_BYTES + 8];
    (void)snprintf(path, sizeof path, "%s/logs", l->run.path);
    if (log_open(path, "launcher", l->config.log_max_size) < 0)
        log_set_threshold(LOG_ERROR);
    log_line(LOG_INFO, "started, pid %d", (int)getpid());
}

static int train(struct launcher *l, const struct supervisor_job *job)
{
    if (run_dir_open(&l->run, l->config.run_output_dir, RUN_DIR_CREATE) < 0)
        return -(int)error_kind_now();
    int rc = run_dir_lock_stores(&l->run, &l->config, RUN_DIR_CREATE);
    if (rc == 0)
        rc = run_dir_adopt_config(&l->run, &l->config);
    if (rc == 0) {
        open_log(l);
        cgroup_open(l->run.id);
        rc = tokenizing_run(l, NULL);
        if (rc == 0)
            rc = supervisor_run(l, job);
        cgroup_close();
        log_line(LOG_INFO, "leaving, status %d", rc < 0 ? -rc : 0);
        log_close();
    }
    /* nothing of a run that could not even begin is left behind */
    if ((rc == -ERROR_USER || rc == -ERROR_FIT || rc == -ERROR_BUSY) && !l->metrics)
        run_dir_undo(&l->run);
    run_dir_close(&l->run);
    if (rc == 0 && !l->finished)
        rc = error_set(ERROR_STOPPED, "%s", ""); /* tell_end() has said it */
    return rc;
}

static int encode_samples(struct launcher *l, const struct plan_request *request,
                          struct prompts *prompts)
{
    if (plan_check_model(l) < 0)
        return -(int)error_kind_now();
    return prompts_encode(l, request->prompts, request->n_prompts, prompts);
}

int command_train(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct prompts prompts = {0};
    int rc = fault_arm_from_environment(topology_role_name(ROLE_LAUNCHER));
    if (rc == 0)
        rc = read_inputs(&l, a);
    struct supervisor_job job = {
        .request = {.mode = PLAN_TRAIN},
        .begin = coordinator_begin,
        .rejoin = coordinator_rejoin,
        .turn = coordinator_turn,
        .done = tell_end,
    };
    if (rc == 0 && l.config.eval_interval && l.config.eval_sample_prompts.count) {
        job.request.prompts = (const char *const *)l.config.eval_sample_prompts.items;
        job.request.n_prompts = l.config.eval_sample_prompts.count;
        job.request.max_new_tokens = l.config.eval_sample_tokens;
        job.request.encoded = l.sample_prompts = &prompts;
        rc = encode_samples(&l, &job.request, &prompts);
    }
    if (rc == 0)
        rc = preflight(&l, &job.request);
    if (rc == 0)
        rc = progress_open(&l.progress, l.config.log_progress, l.config.log_interval);
    if (rc == 0)
        rc = supervisor_open_signals(&l);
    if (rc == 0)
        rc = train(&l, &job);
    progress_close(l.progress); /* ends the bar's line before an error is told */
    l.progress = NULL;
    int status = rc < 0 ? command_fail() : 0;
    prompts_free(&prompts);
    close_all(&l);
    return status;
}

static int replace_text(char **text, const char *value)
{
    free(*text);
    *text = strdup(value);
    return *text ? 0 : error_set(ERROR_FAILED, "out of memory");
}

static void tell_valid(struct launcher *l)
{
    printable_put(l->session.io->message, stdout);
    (void)printf("valid: %llu parameters in %llu pages, %s\n",
                 (unsigned long long)l->layout.parameters, (unsigned long long)l->layout.n_pages,
                 l->session.plan->bf16 ? "bfloat16" : "float32");
}

int command_validate(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct supervisor_job job = {.request = {.mode = PLAN_VALIDATE}, .done = tell_valid};
    struct plan_request training = {.mode = PLAN_TRAIN};
    struct scratch scratch = {.fd = -1};
    char kept[LAUNCHER_PATH_BYTES] = "";
    int rc = read_inputs(&l, a);
    if (rc == 0)
        rc = preflight(&l, &training);
    if (rc == 0)
        rc = scratch_make(&scratch);
    if (rc == 0)
        tokenizing_cache(&l.config, kept);
    if (rc == 0)
        rc = replace_text(&l.config.data_cache_dir, scratch.path);
    if (rc == 0)
        rc = progress_open(&l.progress, CONFIG_PROGRESS_NONE, 1);
    if (rc == 0)
        rc = supervisor_open_signals(&l);
    if (rc == 0)
        rc = tokenizing_run(&l, kept);
    if (rc == 0)
        rc = supervisor_run(&l, &job);
    scratch_remove(&scratch);
    int status = rc < 0 ? command_fail() : 0;
    close_all(&l);
    return status;
}
