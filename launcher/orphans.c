#include "launcher/orphans.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/topology.h"
#include "procs/clock.h"
#include "procs/error.h"

#define MARK_NAME "MTLAUNCH_WORKER"

enum {
    MARK_BYTES = 2 * RUN_ID_BYTES + 32,
    ORPHAN_WAIT_S = 120, /* as long as the fence */
    ORPHAN_TELL_MS = 1000,
    STAT_BYTES = 1024,
};

/* What /proc says of a process. */
struct process {
    int pid, parent;
    char state;
    unsigned long long start; /* clock ticks since boot: with the pid, this is its identity */
    char name[32];
};

static int read_process(int pid, struct process *p)
{
    char path[64], text[STAT_BYTES];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        (void)close(fd); /* read only */
    if (n <= 0)
        return -1;
    text[n] = '\0';
    char *open_mark = strchr(text, '('), *close_mark = strrchr(text, ')'); /* a name may hold ) */
    if (!open_mark || !close_mark || close_mark < open_mark)
        return -1;
    *close_mark = '\0';
    (void)snprintf(p->name, sizeof p->name, "%s", open_mark + 1);
    p->pid = pid;
    return sscanf(close_mark + 1,
                  " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  &p->state, &p->parent, &p->start) == 3
               ? 0
               : -1;
}

static void format_id(const uint8_t id[RUN_ID_BYTES], char *out)
{
    for (int i = 0; i < RUN_ID_BYTES; i++)
        (void)snprintf(out + 2 * i, 3, "%02x", id[i]);
}

int orphans_mark(const uint8_t id[RUN_ID_BYTES])
{
    char hex[2 * RUN_ID_BYTES + 1], mark[MARK_BYTES];
    struct process self;
    format_id(id, hex);
    if (read_process(getpid(), &self) < 0)
        self.start = 0; /* without /proc nobody can look either */
    (void)snprintf(mark, sizeof mark, "%s:%llu", hex, self.start);
    return setenv(MARK_NAME, mark, 1) == 0 ? 0 : error_set(ERROR_FAILED, "out of memory");
}

/* The mark of a process, "" without one, or when it is not ours to look into. */
static void read_mark(int pid, char *out, size_t bytes)
{
    char path[64], *item = NULL;
    size_t capacity = 0;
    *out = '\0';
    (void)snprintf(path, sizeof path, "/proc/%d/environ", pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return;
    while (getdelim(&item, &capacity, '\0', f) > 0)
        if (strncmp(item, MARK_NAME "=", sizeof MARK_NAME) == 0)
            (void)snprintf(out, bytes, "%s", item + sizeof MARK_NAME);
    free(item);
    (void)fclose(f); /* read only */
}

static int has_workers_name(const struct process *p)
{
    return strcmp(p->name, topology_role_name(ROLE_IO)) == 0 ||
           strcmp(p->name, topology_role_name(ROLE_GPU)) == 0 ||
           strcmp(p->name, topology_role_name(ROLE_OPT)) == 0;
}

/* 1 if the process with this number is an orphan of the run with this id, and then what it is. */
static int is_orphan(int pid, const char *hex, struct process *p)
{
    char mark[MARK_BYTES];
    struct process parent;
    unsigned long long launcher;
    if (read_process(pid, p) < 0 || !has_workers_name(p))
        return 0;
    read_mark(pid, mark, sizeof mark);
    if (strncmp(mark, hex, 2 * RUN_ID_BYTES) != 0 ||
        sscanf(mark + 2 * RUN_ID_BYTES, ":%llu", &launcher) != 1 || launcher == 0)
        return 0;
    if (p->parent == 0)
        return 0; /* the parent is outside our namespace: not ours to judge */
    return read_process(p->parent, &parent) < 0 || parent.start != launcher;
}

/* -- ending one -- */

static int wait_for_end(int pidfd, const struct process *p)
{
    struct pollfd end = {.fd = pidfd, .events = POLLIN};
    uint64_t since = clock_now_ns();
    int told = 0;
    while (poll(&end, 1, ORPHAN_TELL_MS) <= 0) {
        double waited = clock_seconds_since(since);
        if (!told && waited * 1e3 >= ORPHAN_TELL_MS)
            (void)fprintf(stderr, "waiting for process %d (%s) of a dead launcher to end\n", p->pid,
                          p->name);
        told = 1;
        if (waited < ORPHAN_WAIT_S)
            continue;
        struct process now = *p;
        (void)read_process(p->pid, &now); /* gone by now: the old state is told */
        (void)error_set(
            ERROR_BUSY,
            "process %d (%s, state %c) of a dead launcher of this run cannot be killed: "
            "not ended after %d s",
            p->pid, p->name, now.state, ORPHAN_WAIT_S);
        return error_hint("its I/O may still be under way; nothing was changed. State D: a drive "
                          "does not answer; T: it is frozen or traced");
    }
    return 0;
}

/* 1 ended, 0 it was no orphan after all, negative. */
static int end_one(int pid, const char *hex, const struct process *seen)
{
    struct process now;
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return 0; /* gone */
    int rc = is_orphan(pid, hex, &now) && now.start == seen->start;
    if (rc && syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0) == 0)
        rc = wait_for_end(pidfd, seen) < 0 ? -(int)error_kind_now() : 1;
    (void)close(pidfd); /* a pidfd */
    if (rc > 0)
        (void)fprintf(stderr, "ended process %d (%s), left by a launcher that died\n", pid,
                      seen->name);
    return rc;
}

static int is_ours(int proc_fd, const char *name)
{
    struct stat st;
    return name[0] >= '1' && name[0] <= '9' && fstatat(proc_fd, name, &st, 0) == 0 &&
           st.st_uid == geteuid();
}

int orphans_end(const uint8_t id[RUN_ID_BYTES])
{
    char hex[2 * RUN_ID_BYTES + 1];
    int ended = 0, rc = 0;
    DIR *proc = opendir("/proc");
    format_id(id, hex);
    if (!proc)
        return 0; /* the fence still waits for their I/O */
    for (struct dirent *e; rc >= 0 && (e = readdir(proc));) {
        struct process seen;
        int pid = is_ours(dirfd(proc), e->d_name) ? atoi(e->d_name) : 0;
        if (pid > 0 && is_orphan(pid, hex, &seen)) {
            rc = end_one(pid, hex, &seen);
            ended += rc > 0;
        }
    }
    (void)closedir(proc); /* read only */
    return rc < 0 ? rc : ended;
}
