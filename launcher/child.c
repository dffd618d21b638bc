#include "launcher/child.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launcher/cgroup.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/lifeline.h"

static int pid_open(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0); /* glibc 2.36 has a wrapper; older ones do not */
}

/* The workers lie beside the real mtlaunch, or in ../libexec/mtlaunch after `make install`. */
static int program_path(char *out, size_t bytes, const char *name)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        return error_set(ERROR_FAILED, "/proc/self/exe: %s", strerror(errno));
    self[n] = '\0';
    *strrchr(self, '/') = '\0';
    static const char *const places[] = {"", "/../libexec/mtlaunch"};
    for (size_t i = 0; i < 2; i++) {
        int length = snprintf(out, bytes, "%s%s/%s", self, places[i], name);
        if (length > 0 && (size_t)length < bytes && access(out, X_OK) == 0)
            return 0;
    }
    (void)error_set(ERROR_FAILED, "%s: no program %s there or in ../libexec/mtlaunch", self, name);
    return error_hint("build all of it with `make`");
}

/* Opened once and kept: a program that is built or installed anew while the run goes on has another
 * idea of the memory that all share, and rounds otherwise. -1: error_set. */
static int program_of(enum role role)
{
    static int programs[ROLE_COUNT] = {-1, -1, -1, -1};
    char path[PATH_MAX];
    if (programs[role] >= 0)
        return programs[role];
    if (program_path(path, sizeof path, topology_role_name(role)) < 0)
        return -1;
    programs[role] = open(path, O_PATH | O_CLOEXEC);
    if (programs[role] < 0)
        (void)error_set(ERROR_FAILED, "%s: %s", path, strerror(errno));
    return programs[role];
}

static _Noreturn void become(int program, const char *name, pid_t launcher, int segment_fd,
                             uint32_t index)
{
    char fd_text[16], index_text[16];
    sigset_t none;
    if (lifeline_tie(launcher) < 0)
        _exit(127);
    cgroup_enter();
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)setpgid(0, 0); /* terminal signals are the launcher's alone */
    (void)fcntl(segment_fd, F_SETFD, 0);
    (void)snprintf(fd_text, sizeof fd_text, "%d", segment_fd);
    (void)snprintf(index_text, sizeof index_text, "%u", index);
    const char *const arguments[] = {name, fd_text, index_text, NULL};
    (void)syscall(SYS_execveat, program, "", arguments, environ, AT_EMPTY_PATH);
    (void)fcntl(program, F_SETFD, 0); /* a script's interpreter opens it as /dev/fd/N */
    (void)syscall(SYS_execveat, program, "", arguments, environ, AT_EMPTY_PATH);
    (void)fprintf(stderr, "%s: %s\n", name, strerror(errno));
    _exit(127);
}

int child_start(struct child *child, int segment_fd)
{
    const char *name = topology_role_name(child->role);
    int program = program_of(child->role);
    if (program < 0 || lifeline_open() < 0)
        return -(int)error_kind_now();
    (void)fflush(NULL);
    pid_t launcher = getpid(), pid = fork();
    if (pid < 0)
        return error_set(ERROR_FAILED, "fork: %s", strerror(errno));
    if (pid == 0)
        become(program, name, launcher, segment_fd, child->index);
    child->pid = pid;
    child->pid_fd = pid_open(pid);
    child->state = CHILD_RUNNING;
    child->alive_ns = clock_now_ns();
    child->heartbeat = child->asleep_ns = child->paused_ns = child->abort_ns = child->kill_ns = 0;
    child->verdict[0] = '\0';
    if (child->pid_fd < 0)
        return error_set(ERROR_FAILED, "pidfd_open: %s", strerror(errno));
    (void)fcntl(child->pid_fd, F_SETFD, FD_CLOEXEC);
    return 0;
}

int child_poll(struct child *child)
{
    if (child->state != CHILD_RUNNING)
        return child->state == CHILD_DEAD;
    pid_t rc = waitpid(child->pid, &child->status, WNOHANG);
    if (rc == 0 || (rc < 0 && errno == EINTR))
        return 0;
    CHECK(rc == child->pid); /* it is our child, and nobody else reaps it */
    child->state = CHILD_DEAD;
    (void)close(child->pid_fd);
    child->pid_fd = -1;
    return 1;
}

int child_has_ended(const struct child *child)
{
    struct pollfd end = {.fd = child->pid_fd, .events = POLLIN};
    return child->state != CHILD_RUNNING || poll(&end, 1, 0) > 0;
}

void child_signal(struct child *child, int signal)
{
    if (child->state == CHILD_RUNNING)
        (void)syscall(SYS_pidfd_send_signal, child->pid_fd, signal, NULL,
                      0); /* ESRCH: dead already */
}

int child_wait(struct child *child, int timeout_ms)
{
    uint64_t until = clock_now_ns() + (uint64_t)timeout_ms * 1000000u;
    while (!child_poll(child)) {
        uint64_t now = clock_now_ns();
        struct pollfd p = {.fd = child->pid_fd, .events = POLLIN};
        if (now >= until)
            return 0;
        (void)poll(&p, 1,
                   (int)((until - now) / 1000000u) + 1); /* an early return only looks again */
    }
    return 1;
}

const char *child_cause(const struct child *child, char *text, uint64_t bytes)
{
    if (WIFSIGNALED(child->status))
        (void)snprintf(text, bytes, "killed by signal %d (%s)", WTERMSIG(child->status),
                       strsignal(WTERMSIG(child->status)));
    else
        (void)snprintf(text, bytes, "exited with status %d", WEXITSTATUS(child->status));
    return text;
}
