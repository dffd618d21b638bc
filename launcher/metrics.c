#include "launcher/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "model/tokenizer_bytes.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"
#include "procs/printable.h"

enum { METRICS_LINE_BYTES_MAX = 16384, RETRY_MS = 200 };

struct metrics {
    int fd;
    int complained;
    uint64_t evaluated;        /* step of the newest eval event */
    uint64_t sampled, samples; /* step of the newest sample events, prompts they answered */
    uint64_t lines;            /* of steps, found by repair() */
    off_t durable;             /* bytes of the file that are surely on disk */
    char *fresh;               /* the lines behind them */
    size_t fresh_bytes;
    int behind;                 /* not all of `fresh` is in the file: there was no room */
    uint64_t full_ns, tried_ns; /* since when; last try */
    char path[4096 + 32];
};

/* The step of a step line; 0 for an event, UINT64_MAX for what is no line of ours. */
static uint64_t line_step(const char *line)
{
    unsigned long long step;
    if (line[0] != '{' || !strchr(line, '\n'))
        return UINT64_MAX;
    return sscanf(line, "{\"step\": %llu", &step) == 1 ? step : 0;
}

/* What an evaluation has told: its loss, then a sample for each prompt. */
static void note_evaluation(struct metrics *m, const char *line)
{
    unsigned long long step, prompt;
    const char *at = strstr(line, "\"step\": ");
    if (!at || strncmp(line, "{\"event\": \"", 11) != 0)
        return;
    if (strncmp(line + 11, "eval\"", 5) == 0 && sscanf(at, "\"step\": %llu", &step) == 1)
        m->evaluated = step;
    if (strncmp(line + 11, "sample\"", 7) == 0 &&
        sscanf(at, "\"step\": %llu, \"prompt\": %llu", &step, &prompt) == 2) {
        m->sampled = step;
        m->samples = prompt + 1;
    }
}

/* Copies what may stay to `out`, from the first line that may not. 1 if anything was dropped. */
static int filter(struct metrics *m, FILE *in, FILE *out, uint64_t committed, long *keep)
{
    static char line[METRICS_LINE_BYTES_MAX];
    int dropped = 0;
    *keep = 0;
    while (fgets(line, sizeof line, in)) {
        uint64_t step = line_step(line);
        int bad = step == UINT64_MAX || step > committed;
        dropped |= bad;
        note_evaluation(m, line);
        m->lines += !bad && step > 0;
        if (!dropped)
            *keep = ftell(in);
        else if (!bad)
            (void)fputs(line, out);
    }
    return dropped;
}

/* Each committed step had its line before its commit: what lacks was damaged or taken away since.
 */
static void tell_missing(const struct metrics *m, uint64_t committed)
{
    if (m->lines == committed)
        return;
    (void)fputs("warning: ", stderr);
    printable_put(m->path, stderr);
    (void)fprintf(stderr,
                  ": expected a line of each of %llu committed steps, found %llu whole ones; the "
                  "run's state does not depend on them\n",
                  (unsigned long long)committed, (unsigned long long)m->lines);
}

/* Lines behind the first dropped one are few: events of the steps in flight. */
static int repair(struct metrics *m, uint64_t committed)
{
    const char *path = m->path;
    FILE *in = fopen(path, "re");
    char *rest = NULL;
    size_t rest_bytes = 0;
    long keep = 0;
    if (!in)
        return errno == ENOENT ? 0 : error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    FILE *out = open_memstream(&rest, &rest_bytes);
    int dropped = out ? filter(m, in, out, committed, &keep) : 0;
    (void)fclose(in); /* read only */
    if (!out || fclose(out) != 0) {
        free(rest);
        return error_set(ERROR_FAILED, "%s: out of memory", path);
    }
    int rc = 0;
    if (dropped) {
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || ftruncate(fd, keep) < 0 ||
            pwrite(fd, rest, rest_bytes, keep) != (ssize_t)rest_bytes || fsync(fd) < 0)
            rc = error_set(ERROR_FAILED, "%s: cannot cut lines past step %llu: %s", path,
                           (unsigned long long)committed, strerror(errno));
        if (fd >= 0)
            (void)close(fd); /* fsync has told */
    }
    free(rest);
    return rc;
}

int metrics_has_steps(const char *directory)
{
    static char line[METRICS_LINE_BYTES_MAX];
    char path[4096 + 32];
    int found = 0;
    (void)snprintf(path, sizeof path, "%s/metrics.jsonl", directory);
    FILE *in = fopen(path, "re");
    while (in && !found && fgets(line, sizeof line, in)) {
        uint64_t step = line_step(line);
        found = step != 0 && step != UINT64_MAX;
    }
    if (in)
        (void)fclose(in); /* read only */
    return found;
}

/* Creates or opens the file; its name is made durable: who created it may have died before. */
static int open_file(struct metrics *m, const char *directory)
{
    m->fd = open(m->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    m->durable = m->fd < 0 ? -1 : lseek(m->fd, 0, SEEK_END);
    if (m->durable < 0)
        return error_set(ERROR_FAILED, "%s: %s", m->path, strerror(errno));
    if (mutant(MUTANT_metrics_name_not_durable))
        return 0;
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) < 0
                 ? error_set(ERROR_FAILED, "%s: fsync: %s", directory, strerror(errno))
                 : 0;
    if (fd >= 0)
        (void)close(fd); /* opened for reading */
    return rc;
}

int metrics_open(struct metrics **out, const char *directory, uint64_t committed)
{
    struct metrics *m = calloc(1, sizeof *m);
    *out = NULL;
    if (!m)
        return error_set(ERROR_FAILED, "out of memory");
    m->fd = -1;
    (void)snprintf(m->path, sizeof m->path, "%s/metrics.jsonl", directory);
    if (repair(m, committed) < 0 || open_file(m, directory) < 0) {
        metrics_close(m);
        return -(int)error_kind_now();
    }
    tell_missing(m, committed);
    *out = m;
    return 0;
}

uint64_t metrics_last_evaluation(const struct metrics *m, uint64_t prompts)
{
    if (prompts == 0)
        return m->evaluated;
    return m->sampled && m->samples < prompts ? m->sampled - 1 : m->sampled;
}

void metrics_close(struct metrics *m)
{
    if (!m)
        return;
    if (m->fd >= 0)
        (void)close(m->fd); /* lines that matter were fsynced */
    free(m->fresh);
    free(m);
}

static int is_full(int error)
{
    return error == ENOSPC || error == EDQUOT;
}

/* Takes everything behind `size` out of the file again and says why: METRICS_FULL or an error. */
static int take_back(struct metrics *m, off_t size, const char *what, int failure)
{
    (void)!ftruncate(m->fd, size); /* what it leaves is cut by the next start */
    (void)error_set(ERROR_FAILED, "%s: %s: %s", m->path, what, strerror(failure));
    (void)error_hint("the run's state is intact; %s and start it again",
                     is_full(failure) ? "free some space" : "see to the disk");
    return is_full(failure) ? METRICS_FULL : -ERROR_FAILED;
}

/* Appends all of the text or nothing. */
static int put(struct metrics *m, const char *text, size_t n)
{
    off_t before = lseek(m->fd, 0, SEEK_END);
    ssize_t wrote = write(m->fd, text, n);
    if (wrote == (ssize_t)n)
        return 0;
    return take_back(m, before, "cannot append", wrote < 0 ? errno : ENOSPC);
}

static int keep(struct metrics *m, const char *text, size_t n)
{
    char *more = realloc(m->fresh, m->fresh_bytes + n);
    if (!more)
        return error_set(ERROR_FAILED, "out of memory");
    memcpy(more + m->fresh_bytes, text, n);
    m->fresh = more;
    m->fresh_bytes += n;
    return 0;
}

static void fall_behind(struct metrics *m)
{
    m->tried_ns = clock_now_ns();
    if (!m->behind)
        m->full_ns = m->tried_ns;
    m->behind = 1;
}

int metrics_append(struct metrics *m, const char *json)
{
    char line[METRICS_LINE_BYTES_MAX];
    int n = snprintf(line, sizeof line, "%s\n", json);
    if (n < 0 || n >= (int)sizeof line)
        return error_set(ERROR_FAILED, "%s: a line of more than %d bytes", m->path,
                         METRICS_LINE_BYTES_MAX);
    if (keep(m, line, (size_t)n) < 0)
        return -ERROR_FAILED;
    int rc = m->behind ? 0 : put(m, line, (size_t)n);
    if (rc == METRICS_FULL)
        fall_behind(m);
    return rc < 0 ? rc : 0;
}

/* Tests cannot wait an hour: MTLAUNCH_FULL_DISK_S is for them. */
double metrics_patience_s(void)
{
    const char *text = getenv("MTLAUNCH_FULL_DISK_S");
    double seconds = text ? strtod(text, NULL) : 0.0;
    return seconds > 0.0 ? seconds : METRICS_FULL_S;
}

/* All fresh lines into the file and to the disk. After a failed fdatasync the kernel may have
 * dropped them, so they are written again and not merely flushed again. */
static int try_flush(struct metrics *m)
{
    if (m->behind) {
        if (ftruncate(m->fd, m->durable) < 0)
            return error_set(ERROR_FAILED, "%s: cannot truncate: %s", m->path, strerror(errno));
        int rc = put(m, m->fresh, m->fresh_bytes);
        if (rc != 0)
            return rc;
    }
    return fdatasync(m->fd) < 0 ? take_back(m, m->durable, "fdatasync", errno) : 0;
}

int metrics_flush(struct metrics *m)
{
    fault_point(FAULT_launcher_line_written);
    if (m->behind && clock_seconds_since(m->tried_ns) * 1e3 < RETRY_MS)
        return METRICS_FULL;
    int rc = try_flush(m);
    if (rc == METRICS_FULL) {
        fall_behind(m);
        return clock_seconds_since(m->full_ns) < metrics_patience_s() ? rc : -ERROR_FAILED;
    }
    if (rc < 0)
        return rc;
    m->durable += (off_t)m->fresh_bytes;
    m->fresh_bytes = 0;
    m->behind = 0;
    return 0;
}

const char *metrics_path(const struct metrics *m)
{
    return m->path;
}

/* 0 if the event stands in the file. */
static int put_event(struct metrics *m, char *line, size_t n)
{
    if (m->behind)
        return error_set(ERROR_FAILED, "%s: events are left out: the disk is full", m->path);
    line[n++] = '\n';
    int rc = put(m, line, n);
    return rc == 0 ? keep(m, line, n) : -ERROR_FAILED;
}

static void complain(void)
{
    (void)fputs("warning: ", stderr);
    printable_put(error_text(), stderr);
    (void)fputc('\n', stderr);
}

void metrics_event(struct metrics *m, const char *name, const char *fields)
{
    char line[METRICS_LINE_BYTES_MAX - 1], when[32];
    struct timespec now;
    struct tm utc;
    if (!m)
        return;
    (void)clock_gettime(CLOCK_REALTIME, &now); /* cannot fail for this clock */
    (void)gmtime_r(&now.tv_sec, &utc);
    (void)strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &utc);
    int n = snprintf(line, sizeof line, "{\"event\": \"%s\", \"time\": \"%s.%03ldZ\"%s}", name,
                     when, now.tv_nsec / 1000000, fields);
    int rc = n < (int)sizeof line - 1
                 ? put_event(m, line, (size_t)n)
                 : error_set(ERROR_FAILED, "%s: event %s of %d bytes left out", m->path, name, n);
    if (rc < 0 && !m->complained++)
        complain();
}

/* Bytes of the UTF-8 character at `text`, 0 if there is none: a model may say anything. */
static size_t character_bytes(const unsigned char *text)
{
    struct utf8_check check = {0};
    size_t n = 0;
    do
        if (utf8_check_feed(&check, text + n, 1) < 0) /* the NUL at the end is no continuation */
            return 0;
    while (n++, utf8_check_end(&check) < 0);
    return n;
}

const char *metrics_quote(char *out, uint64_t bytes, const char *text)
{
    uint64_t n = 0;
    if (bytes < 3)
        return "\"\"";
    out[n++] = '"';
    for (const unsigned char *p = (const unsigned char *)text; *p && n + 8 < bytes;) {
        size_t length = character_bytes(p);
        if (*p == '"' || *p == '\\')
            out[n++] = '\\';
        int control = length != 0 && printable_control_bytes(p);
        if (length == 0 || control) {
            unsigned code = length == 2 ? p[1] : p[0]; /* a C1 control is 0xc2 and itself */
            n += (uint64_t)snprintf(out + n, bytes - n, "\\u%04x", length ? code : 0xfffd);
        } else {
            memcpy(out + n, p, length);
            n += length;
        }
        p += length ? length : 1;
    }
    out[n++] = '"';
    out[n] = '\0';
    return out;
}
