/*
 * `mtlaunch scrub RUN_DIR`: is everything there, and is it what was written? io_worker reads the
 * store (io_worker/scrub.c); this reads the rest of the run directory. One line per damage on
 * stdout, then a summary. Nothing is written, and locks are shared: it works on a read-only mount,
 * and refuses a run that is alive.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/command.h"
#include "launcher/metrics.h"
#include "launcher/plan_build.h"
#include "launcher/progress.h"
#include "launcher/run_dir.h"
#include "launcher/step_line.h"
#include "launcher/supervisor.h"
#include "launcher/target.h"
#include "model/jsonl.h"
#include "procs/error.h"
#include "procs/printable.h"

/* What the run directory said beside the store. */
struct scrub_findings {
    uint64_t damages;     /* in all */
    uint64_t resume_step; /* UINT64_MAX: nothing to resume from */
    int complete;         /* the store was looked at to its end */
};

static struct scrub_findings found; /* the supervisor calls back with the launcher alone */

static void tell_damage(const char *file, uint64_t offset)
{
    found.damages++;
    printable_put(file, stdout);
    (void)printf(": offset %" PRIu64 ": ", offset);
    printable_put(error_text(), stdout);
    (void)fputc('\n', stdout);
}

/* -- metrics.jsonl -- */

struct metrics_scan {
    const char *path;
    uint64_t next;        /* the step whose line must come next */
    uint64_t newest;      /* commit; UINT64_MAX: unknown */
    const char *hash;     /* of its state, 32 digits */
    uint64_t line_offset; /* of the line at hand */
};

static int check_hash(const struct metrics_scan *m, const char *line)
{
    const char *at = strstr(line, "\"state_hash\": \"");
    at = at ? at + strlen("\"state_hash\": \"") : "";
    if (strncmp(at, m->hash, 32) == 0)
        return 0;
    return error_set(ERROR_FAILED, "state_hash of step %" PRIu64 ": expected %s, found %.32s",
                     m->newest, m->hash, at);
}

/* Negative: the line is damaged. A step line stands there once, in order; one past the newest
 * commit may be there, of a step that was cut off. */
static int check_line(struct metrics_scan *m, const char *line, size_t n)
{
    unsigned long long step;
    if (jsonl_object_check(line, n) < 0)
        return -ERROR_FAILED;
    if (sscanf(line, "{\"step\": %llu,", &step) != 1)
        return strncmp(line, "{\"event\": \"", 11) == 0
                   ? 0
                   : error_set(ERROR_FAILED, "expected the line of a step or an event");
    uint64_t wanted = m->next;
    m->next = step + 1;
    if (step != wanted)
        return error_set(ERROR_FAILED, "expected the line of step %" PRIu64 ", found step %llu",
                         wanted, step);
    return step == m->newest ? check_hash(m, line) : 0;
}

static int open_quietly(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOATIME);
    return fd < 0 && errno == EPERM ? open(path, O_RDONLY | O_CLOEXEC) : fd;
}

static void scan_lines(struct metrics_scan *m, FILE *in)
{
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t n; (n = getline(&line, &capacity, in)) > 0; m->line_offset += (uint64_t)n) {
        if (line[n - 1] != '\n') /* a launcher that was killed was writing it: resume cuts it */
            break;
        if (check_line(m, line, (size_t)n - 1) < 0)
            tell_damage(m->path, m->line_offset);
    }
    if (ferror(in)) {
        (void)error_set(ERROR_FAILED, "cannot read: %s", strerror(errno));
        tell_damage(m->path, m->line_offset);
    }
    free(line);
}

static void check_metrics(const struct launcher *l)
{
    const struct worker_control *io = l->session.io;
    char path[LAUNCHER_PATH_BYTES + 32], hash[33];
    struct metrics_scan m = {.path = path, .next = 1, .newest = UINT64_MAX, .hash = hash};
    (void)snprintf(path, sizeof path, "%s/metrics.jsonl", l->run.path);
    step_line_hash(hash, io->state_hash[0]);
    if (io->resume_step != UINT64_MAX)
        m.newest = io->resume_step;
    int fd = open_quietly(path);
    FILE *in = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (in) {
        scan_lines(&m, in);
        (void)fclose(in); /* read only */
    } else if (errno != ENOENT || (m.newest != UINT64_MAX && m.newest > 0)) {
        (void)error_set(ERROR_FAILED, "%s", strerror(errno));
        tell_damage(path, 0);
        return;
    }
    if (m.newest != UINT64_MAX && m.next <= m.newest) {
        (void)error_set(ERROR_FAILED,
                        "expected lines up to step %" PRIu64 ", found none after step %" PRIu64,
                        m.newest, m.next - 1);
        tell_damage(path, m.line_offset);
    }
}

/* -- the command -- */

static void finish(struct launcher *l)
{
    const struct worker_control *io = l->session.io;
    found.complete = 1;
    found.damages += io->damages;
    found.resume_step = io->resume_step;
    check_metrics(l);
    printable_put(io->message, stdout);
    (void)printf("damaged places: %" PRIu64 "\n", found.damages);
}

static int verdict(void)
{
    if (found.damages == 0)
        return 0;
    if (!found.complete)
        (void)error_set(ERROR_FAILED, "damaged: the store could not be looked at");
    else if (found.resume_step == UINT64_MAX)
        (void)error_set(ERROR_FAILED, "damaged: no commit can be resumed from as things are");
    else
        (void)error_set(ERROR_FAILED,
                        "damaged, but the commit of step %" PRIu64 " is whole: a resume goes on "
                        "from there",
                        found.resume_step);
    return error_hint("nothing was changed. Check the drive (SMART, dmesg); restore what is named "
                      "above from a copy, or `mtlaunch export` what can still be read");
}

/* 1 to go on, 0 when the directory itself is damaged (told), negative. */
static int open_to_look(struct launcher *l, const char *path)
{
    char id[LAUNCHER_PATH_BYTES + 8], config[LAUNCHER_PATH_BYTES + 16];
    (void)snprintf(id, sizeof id, "%s/run.id", path);
    (void)snprintf(config, sizeof config, "%s/config.toml", path);
    if (run_dir_open(&l->run, path, RUN_DIR_READ_ONLY) < 0) {
        if (error_kind_now() != ERROR_USER || !strstr(error_text(), "/run.id: "))
            return -(int)error_kind_now();
        tell_damage(id, 0);
        return 0;
    }
    if (run_dir_read_config(path, &l->config) < 0) {
        tell_damage(config, 0);
        return 0;
    }
    if (run_dir_lock_stores(&l->run, &l->config, RUN_DIR_READ_ONLY) < 0 ||
        plan_load_model(&l->config, &l->layout) < 0)
        return -(int)error_kind_now();
    return 1;
}

int command_scrub(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct target target = {0};
    struct supervisor_job job = {.request = {.mode = PLAN_SCRUB, .weights_from_store = 1},
                                 .done = finish};
    const char *path = NULL;
    char real[PATH_MAX];
    int rc = options_only(a, "scrub RUN_DIR", &path);
    if (rc == 0 && !realpath(path, real))
        rc = error_set(ERROR_USER, "%s: %s", path, strerror(errno));
    int whole = rc == 0 ? open_to_look(&l, real) : rc;
    rc = whole < 0 ? whole : 0;
    if (whole > 0)
        rc = progress_open(&l.progress, CONFIG_PROGRESS_AUTO, 1);
    if (rc == 0 && whole > 0)
        rc = supervisor_open_signals(&l);
    if (rc == 0 && whole > 0)
        rc = supervisor_run(&l, &job);
    if (rc == -ERROR_USER && whole > 0 && metrics_has_steps(l.run.path)) {
        tell_damage(l.run.path, 0); /* no store, or none that ever had a commit */
        rc = 0;
    }
    if (rc == 0)
        rc = verdict();
    (void)fflush(stdout); /* before what is told on stderr */
    return target_close(&target, &l, rc);
}
