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
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/printable.h"

enum { METRICS_LINE_BYTES_MAX = 16384 };

struct metrics {
    int fd;
    int complained;
    uint64_t evaluated;        /* step of the newest eval event */
    uint64_t sampled, samples; /* step of the newest sample events, prompts they answered */
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
        if (!dropped)
            *keep = ftell(in);
        else if (!bad)
            (void)fputs(line, out);
    }
    return dropped;
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

int metrics_open(struct metrics **out, const char *directory, uint64_t committed)
{
    struct metrics *m = calloc(1, sizeof *m);
    *out = NULL;
    if (!m)
        return error_set(ERROR_FAILED, "out of memory");
    (void)snprintf(m->path, sizeof m->path, "%s/metrics.jsonl", directory);
    if (repair(m, committed) < 0) {
        free(m);
        return -(int)error_kind_now();
    }
    m->fd = open(m->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (m->fd < 0) {
        int rc = error_set(ERROR_FAILED, "%s: %s", m->path, strerror(errno));
        free(m);
        return rc;
    }
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
    (void)close(m->fd); /* lines that matter were fsynced */
    free(m);
}

int metrics_append(struct metrics *m, const char *json)
{
    char line[METRICS_LINE_BYTES_MAX];
    int n = snprintf(line, sizeof line, "%s\n", json);
    if (n < 0 || n >= (int)sizeof line)
        return error_set(ERROR_FAILED, "%s: a line of more than %d bytes", m->path,
                         METRICS_LINE_BYTES_MAX);
    ssize_t wrote = write(m->fd, line, (size_t)n);
    if (wrote != n) {
        (void)error_set(ERROR_FAILED, "%s: cannot append: %s", m->path,
                        wrote < 0 ? strerror(errno) : "the disk is full");
        return error_hint("the run's state is intact; free some space and start it again");
    }
    return 0;
}

int metrics_flush(struct metrics *m)
{
    fault_point(FAULT_launcher_line_written);
    if (fdatasync(m->fd) < 0)
        return error_set(ERROR_FAILED, "%s: fdatasync: %s", m->path, strerror(errno));
    return 0;
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
    int rc = n < (int)sizeof line
                 ? metrics_append(m, line)
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
