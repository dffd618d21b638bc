#include "procs/log.h"

#include "procs/check.h"
#include "procs/error.h"
#include "procs/printable.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {
#define X(id, name) [id] = name,
    LOG_LEVELS(X)
#undef X
};
_Static_assert(sizeof level_names / sizeof level_names[0] == LOG_LEVEL_COUNT, "each has a name");

/* The one log of this process. fd is -1 between a failed rotation and the next line's attempt. */
static struct {
    int fd;
    int is_file;
    int is_torn; /* the last line ended in the middle: the next one begins with a newline */
    enum log_level threshold;
    uint64_t bytes;
    uint64_t bytes_max; /* 0 = no limit */
    uint64_t lines_lost;
    uint64_t lines_lost_untold;
    int complained; /* stderr was told that lines are being lost */
    char name[64];
    char path[PATH_MAX];
    char path_old[PATH_MAX + 2];
} self = {.fd = STDERR_FILENO, .threshold = LOG_INFO};

/* A line under construction; `used` never passes the room kept for "...\n". */
struct line {
    char text[LOG_LINE_BYTES_MAX];
    size_t used;
    int is_cut;
};

static void line_append(struct line *line, const char *text, size_t bytes)
{
    size_t room = sizeof line->text - sizeof "...\n" - line->used;
    line->is_cut |= bytes > room;
    if (line->is_cut)
        return;
    memcpy(line->text + line->used, text, bytes);
    line->used += bytes;
}

static void line_append_escaped(struct line *line, const char *text)
{
    unsigned controls = 0;
    for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
        char escape[8];
        if (controls == 0)
            controls = printable_control_bytes(at);
        if (controls == 0)
            (void)snprintf(escape, sizeof escape, "%c", *at);
        else if (*at == '\n' || *at == '\t' || *at == '\r')
            (void)snprintf(escape, sizeof escape, "\\%c", "tn??r"[*at - '\t']);
        else
            (void)snprintf(escape, sizeof escape, "\\x%02x", *at);
        controls -= controls > 0;
        line_append(line, escape, strlen(escape));
    }
}

static void line_start(struct line *line, enum log_level level)
{
    struct timespec now;
    struct tm utc;
    char head[160];
    (void)clock_gettime(CLOCK_REALTIME, &now); /* cannot fail for this clock */
    (void)gmtime_r(&now.tv_sec, &utc);
    size_t used = strftime(head, sizeof head, "%Y-%m-%dT%H:%M:%S", &utc);
    const char *name = self.name[0] ? self.name : program_invocation_short_name;
    int n = snprintf(head + used, sizeof head - used, ".%06ldZ %s %-5s ", now.tv_nsec / 1000, name,
                     level_names[level]);
    CHECK(n > 0);
    line->used = 0;
    line->is_cut = 0;
    line_append_escaped(line, head);
}

static void line_end(struct line *line)
{
    const char *end = line->is_cut ? "...\n" : "\n";
    memcpy(line->text + line->used, end, strlen(end));
    line->used += strlen(end);
}

/* Opens self.path for appending. 0 or -errno. */
static int file_open(void)
{
    self.fd = open(self.path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (self.fd < 0)
        return -errno;
    struct stat st;
    self.bytes = fstat(self.fd, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0;
    char last = '\n';
    if (self.bytes > 0 && pread(self.fd, &last, 1, (off_t)self.bytes - 1) != 1)
        last = '\n'; /* unreadable: the worst is one joined line */
    self.is_torn = last != '\n';
    return 0;
}

/* 0 or -errno; a failure leaves the log closed or as it was, and the next line tries again. */
static int file_rotate(void)
{
    if (rename(self.path, self.path_old) < 0)
        return -errno;
    (void)close(self.fd); /* nothing is buffered that close could lose */
    return file_open();
}

static int file_ready(size_t bytes)
{
    if (self.fd < 0)
        return file_open();
    if (self.is_file && self.bytes_max > 0 && self.bytes > 0 && self.bytes + bytes > self.bytes_max)
        return file_rotate();
    return 0;
}

/* All of it, or -errno with is_torn set if a part went out. */
static int write_all(const char *text, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = write(self.fd, text + done, bytes - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            self.is_torn |= done > 0;
            return n < 0 ? -errno : -EIO;
        }
        done += (size_t)n;
        self.bytes += (uint64_t)n;
    }
    return 0;
}

static int line_write(const struct line *line)
{
    int rc = file_ready(line->used + 1);
    if (rc == 0 && self.is_torn) {
        rc = write_all("\n", 1);
        self.is_torn = rc < 0;
    }
    return rc < 0 ? rc : write_all(line->text, line->used);
}

static int lost_tell(void)
{
    struct line line;
    char text[64];
    line_start(&line, LOG_WARN);
    (void)snprintf(text, sizeof text, "%llu log lines lost before this one",
                   (unsigned long long)self.lines_lost_untold);
    line_append_escaped(&line, text);
    line_end(&line);
    int rc = line_write(&line);
    if (rc == 0)
        self.lines_lost_untold = 0;
    return rc;
}

/* Once until lines get through again; a terminal that takes nothing is not waited for. */
static void complain(int failure)
{
    char text[PATH_MAX + 128];
    struct pollfd err = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (!self.is_file || self.complained++ || poll(&err, 1, 0) != 1 || !(err.revents & POLLOUT))
        return;
    int n = snprintf(text, sizeof text,
                     "warning: %s: %s; log lines are left out until it can be written again\n",
                     self.path, strerror(-failure));
    (void)!write(STDERR_FILENO, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

static int is_full(int failure)
{
    return failure == -ENOSPC || failure == -EDQUOT;
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level > self.threshold)
        return;
    int saved_errno = errno;
    char text[LOG_LINE_BYTES_MAX];
    struct line line;
    va_list args;
    va_start(args, format);
    if (vsnprintf(text, sizeof text, format, args) < 0)
        (void)snprintf(text, sizeof text, "(this line could not be formatted: %s)", format);
    va_end(args);
    line_start(&line, level);
    line_append_escaped(&line, text);
    line_end(&line);
    int rc = self.lines_lost_untold > 0 ? lost_tell() : 0;
    if (rc == 0)
        rc = line_write(&line);
    if (rc < 0) {
        self.lines_lost++;
        self.lines_lost_untold++;
        complain(rc);
    } else {
        self.complained = 0;
    }
    errno = saved_errno;
}

static int paths_set(const char *dir, const char *name)
{
    int n = snprintf(self.path, sizeof self.path, "%s/%s.log", dir, name);
    if (n < 0 || (size_t)n >= sizeof self.path)
        return error_set(ERROR_USER, "%s: log path: expected at most %zu bytes, found %d", dir,
                         sizeof self.path - 1, n);
    (void)snprintf(self.path_old, sizeof self.path_old, "%s.1", self.path);
    (void)snprintf(self.name, sizeof self.name, "%s", name);
    return 0;
}

int log_open(const char *dir, const char *name, uint64_t max_bytes)
{
    CHECK(name[0] && !strchr(name, '/') && strlen(name) < sizeof self.name);
    log_close();
    if (max_bytes > 0 && max_bytes < LOG_LINE_BYTES_MAX)
        return error_set(ERROR_USER, "log size: expected at least %d bytes (one line), found %llu",
                         LOG_LINE_BYTES_MAX, (unsigned long long)max_bytes);
    if (paths_set(dir, name) < 0)
        return error_wrap("log %s", name);
    if (mkdir(dir, 0700) < 0 && errno != EEXIST) {
        error_set(ERROR_FAILED, "%s: cannot create the log directory: %s", dir, strerror(errno));
        return error_hint("output_dir must exist and be writable");
    }
    int rc = file_open();
    if (rc < 0 && !is_full(rc)) {
        self.fd = STDERR_FILENO;
        return error_set(ERROR_FAILED, "%s: cannot open the log: %s", self.path, strerror(-rc));
    }
    self.is_file = 1;
    self.bytes_max = max_bytes;
    if (rc < 0)
        complain(rc); /* the next line tries again */
    return 0;
}

void log_set_threshold(enum log_level level)
{
    CHECK(level < LOG_LEVEL_COUNT);
    self.threshold = level;
}

uint64_t log_lines_lost(void)
{
    return self.lines_lost;
}

void log_close(void)
{
    if (self.is_file && self.fd >= 0)
        (void)close(self.fd); /* nothing is buffered that close could lose */
    self.fd = STDERR_FILENO;
    self.is_file = 0;
    self.is_torn = 0;
    self.complained = 0;
    self.bytes_max = 0;
    self.name[0] = '\0';
}
