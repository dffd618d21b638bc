/* Commands on a run's store and life: export, digest, stop, clean. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/store_identity.h"
#include "ipc/worker.h"
#include "launcher/command.h"
#include "launcher/plan_build.h"
#include "launcher/run_dir.h"
#include "launcher/run_lock.h"
#include "launcher/step_line.h"
#include "launcher/supervisor.h"
#include "launcher/target.h"
#include "procs/error.h"
#include "procs/printable.h"

enum { STOP_ANSWER_S = 10 };

/* -- digest -- */

static void print_digest(struct launcher *l)
{
    char state[33], weights[33];
    step_line_hash(state, l->session.io->state_hash[0]);
    step_line_hash(weights, l->session.io->weights_hash);
    (void)printf("step %llu state_hash %s weights_hash %s\n",
                 (unsigned long long)l->session.io->resume_step, state, weights);
}

static int open_run(struct target *target, struct launcher *l, const char *path)
{
    int rc = target_open(target, l, path, NULL);
    if (rc == 0 && !target->is_run)
        rc = error_set(ERROR_USER, "%s: not a run directory: no run.id in it", path);
    return rc;
}

int command_digest(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct target target = {0};
    struct supervisor_job job = {.request = {.mode = PLAN_DIGEST}, .done = print_digest};
    const char *path = NULL;
    int rc = options_only(a, "digest RUN_DIR", &path);
    if (rc == 0)
        rc = open_run(&target, &l, path);
    if (rc == 0)
        rc = target_run(&target, &l, &job);
    return target_close(&target, &l, rc);
}

/* -- export -- */

static int set_dtype(struct config *c, const char *name)
{
    static const struct {
        const char *name;
        enum config_checkpoint_export_dtype value;
    } dtypes[] = {{"auto", CONFIG_EXPORT_DTYPE_AUTO},
                  {"float32", CONFIG_EXPORT_DTYPE_FLOAT32},
                  {"bfloat16", CONFIG_EXPORT_DTYPE_BFLOAT16},
                  {"float16", CONFIG_EXPORT_DTYPE_FLOAT16}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            c->checkpoint_export_dtype = dtypes[i].value;
            return 0;
        }
    return error_set(ERROR_USER,
                     "--dtype: expected auto, float32, bfloat16 or float16, found \"%s\"", name);
}

/* Absolute, though it need not exist yet. */
static int absolute(const char *path, char *out, size_t bytes)
{
    char here[PATH_MAX];
    if (path[0] != '/' && !getcwd(here, sizeof here))
        return error_set(ERROR_FAILED, "getcwd: %s", strerror(errno));
    int n = path[0] == '/' ? snprintf(out, bytes, "%s", path)
                           : snprintf(out, bytes, "%s/%s", here, path);
    return n > 0 && n < (int)bytes ? 0 : error_set(ERROR_USER, "%s: the path is too long", path);
}

static void print_export(struct launcher *l)
{
    (void)printf("exported step %llu to ", (unsigned long long)l->session.io->resume_step);
    printable_put(plan_text_get(l->session.plan, l->session.plan->checkpoint.export_dir), stdout);
    (void)fputc('\n', stdout);
}

int command_export(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct target target = {0};
    struct options o;
    char out[LAUNCHER_PATH_BYTES];
    struct supervisor_job job = {.request = {.mode = PLAN_EXPORT, .export_dir = out},
                                 .done = print_export};
    int rc = options_open(&o, a);
    const char *dtype = rc == 0 ? options_value(&o, "dtype") : NULL;
    const char *path = rc == 0 ? options_positional(&o) : NULL;
    const char *to = rc == 0 ? options_positional(&o) : NULL;
    if (rc == 0 && !to)
        rc = error_set(ERROR_USER, "export: expected RUN_DIR OUT_DIR");
    if (rc == 0)
        rc = options_close(&o);
    if (rc == 0)
        rc = absolute(to, out, sizeof out);
    if (rc == 0)
        rc = open_run(&target, &l, path);
    if (rc == 0 && dtype)
        rc = set_dtype(&l.config, dtype);
    if (rc == 0)
        rc = target_run(&target, &l, &job);
    return target_close(&target, &l, rc);
}

/* -- stop -- */

/* Asks until answered: *step is the one after which the run will stop. */
static int ask_stop(const char *path, struct endpoint *endpoint, const char *token,
                    unsigned long long *step)
{
    struct message m = {.type = MESSAGE_STOP}, answer;
    (void)snprintf(m.token, sizeof m.token, "%s", token);
    for (int i = 0; i < STOP_ANSWER_S * 5; i++) {
        if (i % 5 == 0)
            (void)endpoint_send(endpoint, NULL, &m);
        (void)endpoint_sleep(endpoint, NULL, NULL, 0, 200);
        if (endpoint_receive(endpoint, NULL, &answer) == 1 && answer.type == MESSAGE_STOPPING) {
            *step = answer.step;
            return 0;
        }
        if (!run_lock_is_held(path))
            return error_set(ERROR_USER, "%s: the run has ended by itself", path);
    }
    return error_set(ERROR_FAILED, "%s: no answer within %d s", path, STOP_ANSWER_S);
}

int command_stop(const struct arguments *a)
{
    const char *path = NULL;
    char endpoint_path[PLAN_ENDPOINT_BYTES], token[PLAN_TOKEN_BYTES],
        address[PLAN_ENDPOINT_BYTES + 8], name[32];
    struct endpoint *endpoint = NULL;
    unsigned long long step = 0;
    int rc = options_only(a, "stop RUN_DIR", &path);
    if (rc == 0)
        rc = run_dir_read_contact(path, endpoint_path, token);
    if (rc < 0)
        return command_fail();
    (void)snprintf(address, sizeof address, "ipc://%s", endpoint_path);
    (void)snprintf(name, sizeof name, "command.%d", (int)getpid());
    rc = endpoint_connect(&endpoint, address, name);
    if (rc == 0)
        rc = ask_stop(path, endpoint, token, &step);
    endpoint_close(endpoint);
    if (rc < 0)
        return command_fail();
    (void)printf("stopping after step %llu\n", step);
    (void)fflush(stdout);
    while (run_lock_is_held(path))
        (void)usleep(50000);
    return 0;
}

/* -- clean -- */

/* Only the files of this run are removed: 1 ours, 0 there is no store, negative. */
static int is_own_store(const struct run_dir *run, const char *directory)
{
    struct store_identity found;
    char path[LAUNCHER_PATH_BYTES];
    int ours = 0;
    (void)snprintf(path, sizeof path, "%s/superblock", directory);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? 0 : error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    for (int i = 0; i < STORE_SUPERBLOCK_COPIES; i++) {
        ssize_t n = pread(fd, &found, sizeof found, (off_t)i * STORE_SUPERBLOCK_BYTES);
        ours |= n == (ssize_t)sizeof found && found.magic == STORE_SUPERBLOCK_MAGIC &&
                memcmp(found.run, run->id, sizeof found.run) == 0;
    }
    (void)close(fd); /* read only */
    if (ours)
        return 1;
    (void)error_set(ERROR_USER, "%s: not the store of this run: it is damaged or another run's",
                    path);
    return error_hint("nothing was removed; if it is of no use, remove the files superblock, slots "
                      "and commit there");
}

static int remove_store(const char *directory)
{
    static const char *const files[] = {"slots", "commit", "superblock.new", "superblock",
                                        "run.lock"}; /* superblock: it says whose they are */
    char path[LAUNCHER_PATH_BYTES];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", directory, files[i]);
        if (unlink(path) < 0 && errno != ENOENT)
            return error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    }
    if (rmdir(directory) < 0 && errno != ENOENT && errno != ENOTEMPTY && errno != EBUSY)
        return error_set(ERROR_FAILED, "%s: %s", directory, strerror(errno));
    return 0;
}

/* The metrics of the cleaned run stay, under a name that no later start will cut. */
static void keep_metrics(const struct run_dir *run)
{
    char from[LAUNCHER_PATH_BYTES + 16], to[LAUNCHER_PATH_BYTES + 64], id[9];
    for (int i = 0; i < 4; i++)
        (void)snprintf(id + 2 * i, 3, "%02x", run->id[i]);
    (void)snprintf(from, sizeof from, "%s/metrics.jsonl", run->path);
    (void)snprintf(to, sizeof to, "%s/metrics-%s.jsonl", run->path, id);
    (void)rename(from, to); /* there may be none */
}

static int clean(struct launcher *l)
{
    const struct config *c = &l->config;
    char path[LAUNCHER_PATH_BYTES + 16];
    const char *const own_store[] = {path};
    uint64_t n = c->memory_offload_dir.count;
    const char *const *stores = n ? (const char *const *)c->memory_offload_dir.items : own_store;
    (void)snprintf(path, sizeof path, "%s/store", l->run.path);
    for (uint64_t i = 0; i < (n ? n : 1); i++)
        if (is_own_store(&l->run, stores[i]) < 0)
            return -(int)error_kind_now();
    for (uint64_t i = 0; i < (n ? n : 1); i++)
        if (is_own_store(&l->run, stores[i]) == 1 && remove_store(stores[i]) < 0)
            return -(int)error_kind_now();
    (void)snprintf(path, sizeof path, "%s/cache", l->run.path);
    if (run_dir_remove_tree(path) < 0)
        return -(int)error_kind_now();
    keep_metrics(&l->run);
    static const char *const own[] = {"config.toml", "run.id"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", l->run.path, own[i]);
        if (unlink(path) < 0 && errno != ENOENT)
            return error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    }
    return 0;
}

int command_clean(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct target target = {0};
    const char *path = NULL;
    char real[PATH_MAX];
    int rc = options_only(a, "clean RUN_DIR", &path);
    if (rc == 0 && !realpath(path, real))
        rc = error_set(ERROR_USER, "%s: %s", path, strerror(errno));
    if (rc == 0)
        rc = run_dir_open(&l.run, real, RUN_DIR_EXISTING);
    if (rc == 0)
        rc = run_dir_read_config(real, &l.config);
    if (rc == 0)
        rc = run_dir_lock_stores(&l.run, &l.config, RUN_DIR_EXISTING);
    if (rc == 0)
        rc = clean(&l);
    return target_close(&target, &l, rc);
}
