#include "launcher/tokenizer_child.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launcher/cgroup.h"
#include "launcher/progress.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/log.h"

enum { LINE_BYTES = 8192, FIELDS_MAX = 4, POLL_MS = 100, PINS_BYTES_MAX = 1 << 16 };

/* Text that arrives on a pipe, cut into lines; what is too long for one is cut off. */
struct lines {
    int fd;
    size_t used;
    char text[LINE_BYTES];
};

struct tokenizer_child {
    struct launcher *l;
    struct tokenizer_reply reply;
    pid_t pid;
    struct lines out, err;
    uint64_t heard_ns; /* when it last said something */
    int refused;       /* its error line: the exit status that it names; 0 = none yet */
    char error[LINE_BYTES], hint[LINE_BYTES], last[512]; /* last: line of its standard error */
};

/* -- where -- */

int tokenizer_place(struct tokenizer_place *place)
{
    char self[PATH_MAX], probe[LAUNCHER_PATH_BYTES + 64];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        return error_set(ERROR_FAILED, "/proc/self/exe: %s", strerror(errno));
    self[n] = '\0';
    *strrchr(self, '/') = '\0';
    static const char *const programs[] = {"/../../../tools/tokenizer",
                                           "/../libexec/mtlaunch/tokenizer"};
    static const char *const environments[] = {"/../../tokenizer",
                                               "/../libexec/mtlaunch/tokenizer/venv"};
    for (size_t i = 0; i < 2; i++) {
        char real[PATH_MAX];
        (void)snprintf(probe, sizeof probe, "%.3900s%s", self, programs[i]);
        if (!realpath(probe, real))
            continue;
        (void)snprintf(place->program, sizeof place->program, "%.4000s", real);
        (void)snprintf(probe, sizeof probe, "%.4000s/mtlaunch_tokenizer.py", real);
        if (access(probe, R_OK) < 0)
            continue;
        (void)snprintf(place->environment, sizeof place->environment, "%.3900s%s", self,
                       environments[i]);
        if (i == 0) /* the checkout is two levels up */
            (void)snprintf(place->command, sizeof place->command, "make -C %.*s tokenizer",
                           (int)(strlen(real) - strlen("/tools/tokenizer")), real);
        else
            (void)snprintf(place->command, sizeof place->command, "%.4000s/setup.sh", real);
        return 0;
    }
    (void)error_set(ERROR_FAILED, "%s: no tokenizer/mtlaunch_tokenizer.py in ../libexec/mtlaunch",
                    self);
    return error_hint("install all of it with `make install`");
}

static ssize_t read_pins(const char *directory, char *text)
{
    char path[LAUNCHER_PATH_BYTES + 32];
    (void)snprintf(path, sizeof path, "%s/requirements.txt", directory);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = read(fd, text, PINS_BYTES_MAX);
    (void)close(fd); /* read only */
    return n;
}

int tokenizer_check(const struct tokenizer_place *place)
{
    static char wanted[PINS_BYTES_MAX], found[PINS_BYTES_MAX];
    ssize_t n = read_pins(place->program, wanted), m = read_pins(place->environment, found);
    if (n > 0 && n == m && memcmp(wanted, found, (size_t)n) == 0)
        return 0;
    (void)error_set(ERROR_USER,
                    m < 0 ? "text is tokenized by the Hugging Face tokenizers library, and its "
                            "Python environment is not there: %s"
                          : "the tokenizing environment is not the one that this version pins: %s",
                    place->environment);
    return error_hint("make it with `%s` (it needs python3-venv and, once, a package index)",
                      place->command);
}

/* -- what it says -- */

static size_t split(char *line, char *fields[FIELDS_MAX])
{
    size_t n = 0;
    while (n < FIELDS_MAX && line)
        fields[n++] = strsep(&line, "\t");
    return n;
}

static void on_said(struct tokenizer_child *life, char *line)
{
    char *f[FIELDS_MAX] = {0};
    size_t n = split(line, f);
    life->heard_ns = clock_now_ns();
    if (n == 3 && strcmp(f[0], "progress") == 0) {
        progress_activity(life->l->progress, ACTIVITY_TOKENIZING, strtoull(f[1], NULL, 10),
                          strtoull(f[2], NULL, 10));
    } else if (n == 3 && life->reply.take) {
        life->reply.take(life->reply.context, f[0], strtoull(f[1], NULL, 10), f[2]);
    } else if (n == 4 && strcmp(f[0], "error") == 0) {
        int status = atoi(f[1]);
        life->refused = status >= ERROR_FAILED && status <= ERROR_FIT ? status : ERROR_FAILED;
        (void)snprintf(life->error, sizeof life->error, "%s", f[2]);
        (void)snprintf(life->hint, sizeof life->hint, "%s", f[3]);
    } else {
        log_line(LOG_WARN, "tokenizer: unknown line: %s", f[0]);
    }
}

static void on_complained(struct tokenizer_child *life, char *line)
{
    if (!*line)
        return;
    (void)snprintf(life->last, sizeof life->last, "%s", line);
    log_line(LOG_WARN, "tokenizer: %s", line);
}

typedef void on_line(struct tokenizer_child *life, char *line);

static void take_text(struct tokenizer_child *life, struct lines *lines, const char *text, size_t n,
                      on_line *act)
{
    for (size_t i = 0; i < n; i++) {
        if (text[i] != '\n') {
            if (lines->used < LINE_BYTES - 1)
                lines->text[lines->used++] = text[i];
            continue;
        }
        lines->text[lines->used] = '\0';
        lines->used = 0;
        act(life, lines->text);
    }
}

/* All that is there. Closes the pipe at its end, and what is left of a line counts. */
static void take(struct tokenizer_child *life, struct lines *lines, on_line *act)
{
    char text[4096];
    ssize_t n = 0;
    while (lines->fd >= 0 && (n = read(lines->fd, text, sizeof text)) > 0)
        take_text(life, lines, text, (size_t)n, act);
    if (lines->fd < 0 || (n < 0 && (errno == EINTR || errno == EAGAIN)))
        return;
    if (lines->used)
        take_text(life, lines, "\n", 1, act);
    (void)close(lines->fd); /* a pipe that was read to its end */
    lines->fd = -1;
}

/* -- its life -- */

static _Noreturn void become(const struct tokenizer_place *place, pid_t launcher, int job, int out,
                             int err)
{
    char python[LAUNCHER_PATH_BYTES + 16], program[LAUNCHER_PATH_BYTES + 32];
    sigset_t none;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != launcher)
        _exit(127);
    cgroup_enter();
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)signal(SIGPIPE, SIG_DFL);
    (void)setpgid(0, 0); /* terminal signals are the launcher's alone */
    if (dup2(job, STDIN_FILENO) < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(err, STDERR_FILENO) < 0)
        _exit(127);
    (void)snprintf(python, sizeof python, "%s/bin/python", place->environment);
    (void)snprintf(program, sizeof program, "%s/mtlaunch_tokenizer.py", place->program);
    (void)execl(python, python, "-I", "-B", "-u", program, (char *)NULL);
    (void)fprintf(stderr, "%s: %s\n", python, strerror(errno));
    _exit(127);
}

/* The job lies in memory: the child may be slow to read it, or die before it does. */
static int job_file(const char *job, size_t n)
{
    int fd = memfd_create("tokenizer-job", MFD_CLOEXEC);
    if (fd >= 0 && write(fd, job, n) == (ssize_t)n && lseek(fd, 0, SEEK_SET) == 0)
        return fd;
    if (fd >= 0)
        (void)close(fd); /* of no use */
    return error_set(ERROR_FAILED, "memfd of %zu bytes: %s", n, strerror(errno));
}

static int start(struct tokenizer_child *life, const struct tokenizer_place *place, int job)
{
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) < 0)
        return error_set(ERROR_FAILED, "pipe: %s", strerror(errno));
    if (pipe2(err, O_CLOEXEC) < 0) {
        (void)close(out[0]); /* nothing was written */
        (void)close(out[1]);
        return error_set(ERROR_FAILED, "pipe: %s", strerror(errno));
    }
    (void)fflush(NULL);
    pid_t launcher = getpid();
    life->pid = fork();
    if (life->pid == 0)
        become(place, launcher, job, out[1], err[1]);
    int code = errno;
    (void)close(out[1]); /* the child's ends */
    (void)close(err[1]);
    life->out.fd = out[0];
    life->err.fd = err[0];
    (void)fcntl(out[0], F_SETFL, O_NONBLOCK); /* our ends: cannot fail */
    (void)fcntl(err[0], F_SETFL, O_NONBLOCK);
    if (life->pid < 0)
        return error_set(ERROR_FAILED, "fork: %s", strerror(code));
    (void)setpgid(life->pid, life->pid); /* whoever comes first: it or we */
    life->heard_ns = clock_now_ns();
    return 0;
}

static int check_signal(const struct launcher *l)
{
    struct signalfd_siginfo info;
    if (l->signal_fd < 0 || read(l->signal_fd, &info, sizeof info) != (ssize_t)sizeof info)
        return 0;
    (void)error_set(ERROR_STOPPED, "%s: tokenizing is given up", strsignal((int)info.ssi_signo));
    return error_hint("files that are done stay in the cache; start again to go on");
}

static int check_silence(const struct tokenizer_child *life)
{
    uint64_t silent = clock_now_ns() - life->heard_ns;
    if (!life->l->config.run_watchdog || silent < TOKENIZER_SILENCE_S * 1000000000ull)
        return 0;
    return error_set(ERROR_FAILED, "the tokenizer (pid %d) has said nothing for %d s",
                     (int)life->pid, TOKENIZER_SILENCE_S);
}

static void close_pipe(struct lines *lines)
{
    if (lines->fd >= 0)
        (void)close(lines->fd); /* reading ends here */
    lines->fd = -1;
}

/* Its workers end with it: none may be left of the group. */
static void bury(struct tokenizer_child **child)
{
    (void)kill(-(*child)->pid, SIGKILL);
    close_pipe(&(*child)->out);
    close_pipe(&(*child)->err);
    free(*child);
    *child = NULL;
}

static int judge(const struct tokenizer_child *life, int status)
{
    if (life->refused) {
        (void)error_set((enum error_kind)life->refused, "%s", life->error);
        return *life->hint ? error_hint("%s", life->hint) : -life->refused;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    if (WIFSIGNALED(status))
        (void)error_set(ERROR_FAILED, "the tokenizer (pid %d) was killed by signal %d (%s)",
                        (int)life->pid, WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        (void)error_set(ERROR_FAILED, "the tokenizer (pid %d) left with status %d: %s",
                        (int)life->pid, WEXITSTATUS(status), life->last);
    return error_hint("files that are done stay in the cache; start again to go on");
}

int tokenizer_start(struct tokenizer_child **child, struct launcher *l,
                    const struct tokenizer_place *place, const char *job, size_t n,
                    const struct tokenizer_reply *reply)
{
    struct tokenizer_child *life = calloc(1, sizeof *life);
    if (!life)
        return error_set(ERROR_FAILED, "out of memory");
    life->l = l;
    life->out.fd = life->err.fd = -1;
    if (reply)
        life->reply = *reply;
    int fd = job_file(job, n);
    int rc = fd < 0 ? fd : start(life, place, fd);
    if (fd >= 0)
        (void)close(fd); /* the child has its own */
    if (rc < 0) {
        close_pipe(&life->out);
        close_pipe(&life->err);
        free(life);
        return rc;
    }
    log_line(LOG_DEBUG, "tokenizer started, pid %d", (int)life->pid);
    *child = life;
    return 0;
}

int tokenizer_turn(struct tokenizer_child **child)
{
    struct tokenizer_child *life = *child;
    int status;
    take(life, &life->out, on_said);
    take(life, &life->err, on_complained);
    if (life->out.fd < 0 && life->err.fd < 0 && waitpid(life->pid, &status, WNOHANG) == life->pid) {
        int rc = judge(life, status);
        bury(child);
        return rc;
    }
    int rc = check_silence(life);
    if (rc < 0)
        tokenizer_kill(child);
    return rc < 0 ? rc : 1;
}

void tokenizer_kill(struct tokenizer_child **child)
{
    if (!*child)
        return;
    (void)kill(-(*child)->pid, SIGKILL);
    while (waitpid((*child)->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    bury(child);
}

static void wait_for(const struct tokenizer_child *life)
{
    struct pollfd fds[] = {{.fd = life->out.fd, .events = POLLIN},
                           {.fd = life->err.fd, .events = POLLIN},
                           {.fd = life->l->signal_fd, .events = POLLIN}};
    (void)poll(fds, 3, POLL_MS); /* whatever woke us, all is looked at */
}

int tokenizer_run(struct launcher *l, const struct tokenizer_place *place, const char *job,
                  size_t n, const struct tokenizer_reply *reply)
{
    struct tokenizer_child *child = NULL;
    int rc = tokenizer_start(&child, l, place, job, n, reply);
    while (child) {
        wait_for(child);
        if (check_signal(l) < 0) {
            tokenizer_kill(&child);
            return -ERROR_STOPPED;
        }
        rc = tokenizer_turn(&child);
    }
    return rc;
}
