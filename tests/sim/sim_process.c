/* Descriptors, fork, death, signals, sleeping, shared memory: what the product asks of the kernel
 * beside files. */
#include "tests/sim/sim.h"

#include "ipc/page_table.h"
#include "launcher/orphans.h"
#include "launcher/socket_dir.h"
#include "procs/lifeline.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

enum { SEGMENTS_MAX = 24, SEGMENT_BYTES = 512 << 10, ORPHAN_WAIT_S = 120 };

static unsigned char *segments[SEGMENTS_MAX];
static int segment_refs[SEGMENTS_MAX], newest_segment;

/* -- descriptors -- */

struct sim_fd *sim_fd_get(int fd)
{
    struct sim_process *p = sim_self();
    return fd >= 3 && fd < SIM_FDS_MAX && p->fds[fd].kind != FD_NONE ? &p->fds[fd] : NULL;
}

int sim_fd_new(enum sim_fd_kind kind, int object)
{
    struct sim_process *p = sim_self();
    for (int fd = 3; fd < SIM_FDS_MAX; fd++)
        if (p->fds[fd].kind == FD_NONE) {
            p->fds[fd] = (struct sim_fd){.kind = kind, .object = object};
            return fd;
        }
    sim_violation("sim: %s has no descriptor left", topology_role_name(p->role));
    errno = EMFILE;
    return -1;
}

static void fd_close(struct sim_fd *f)
{
    if (f->kind == FD_FILE)
        (void)sim_file_close(f->object);
    if (f->kind == FD_SHARED)
        segment_refs[f->object]--;
    f->kind = FD_NONE;
}

int sim_close(int fd);
int sim_close(int fd)
{
    struct sim_fd *f = sim_fd_get(fd);
    if (!f) {
        errno = EBADF;
        return -1;
    }
    fd_close(f);
    return 0;
}

static int is_dead(int pid)
{
    const struct sim_process *p = sim_find(pid);
    return !p || p->state == SIM_ZOMBIE;
}

int sim_fd_readable(struct sim_process *p, int fd)
{
    if (fd < 3 || fd >= SIM_FDS_MAX)
        return 0;
    const struct sim_fd *f = &p->fds[fd];
    if (f->kind == FD_SIGNAL)
        return p->signalled;
    if (f->kind == FD_PID)
        return is_dead(f->object);
    return f->kind == FD_EVENT && sim_disk_readable(f->object);
}

void sim_sleep_for(int fd)
{
    struct sim_process *p = sim_self();
    const struct sim_fd *f = sim_fd_get(fd);
    if (f && f->kind == FD_PID)
        p->sleeps_for_child = 1;
    if (f && f->kind == FD_EVENT)
        p->sleeps_for_engine = f->object;
}

void sim_process_gone(struct sim_process *p)
{
    for (int fd = 3; fd < SIM_FDS_MAX; fd++)
        if (p->fds[fd].kind != FD_NONE)
            fd_close(&p->fds[fd]);
}

void sim_process_reset(void)
{
    for (int i = 0; i < SEGMENTS_MAX; i++) {
        if (!segments[i])
            segments[i] = aligned_alloc(4096, SEGMENT_BYTES);
        segment_refs[i] = 0;
    }
}

/* -- sleeping and the clock -- */

int sim_clock_gettime(clockid_t clock, struct timespec *t);
int sim_clock_gettime(clockid_t clock, struct timespec *t)
{
    (void)clock;
    t->tv_sec = (time_t)(sim.now_ns / 1000000000u);
    t->tv_nsec = (long)(sim.now_ns % 1000000000u);
    return 0;
}

time_t sim_time(time_t *out);
time_t sim_time(time_t *out)
{
    (void)out;
    return (time_t)(sim.now_ns / 1000000000u);
}

int sim_nanosleep(const struct timespec *t, struct timespec *left);
int sim_nanosleep(const struct timespec *t, struct timespec *left)
{
    struct sim_process *p = sim_self();
    (void)left;
    p->wake_ns = sim.now_ns + (uint64_t)t->tv_sec * 1000000000u + (uint64_t)t->tv_nsec;
    sim_sleep();
    return 0;
}

int sim_usleep(unsigned us);
int sim_usleep(unsigned us)
{
    struct timespec t = {us / 1000000, (long)(us % 1000000) * 1000};
    return sim_nanosleep(&t, NULL);
}

int sim_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int sim_poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    struct sim_process *p = sim_self();
    int ready = 0;
    for (nfds_t i = 0; i < n; i++)
        ready += sim_fd_readable(p, fds[i].fd);
    if (!ready && timeout_ms != 0) {
        for (nfds_t i = 0; i < n; i++)
            sim_sleep_for(fds[i].fd);
        p->wake_ns = timeout_ms < 0 ? UINT64_MAX : sim.now_ns + (uint64_t)timeout_ms * 1000000u;
        sim_sleep();
    }
    for (nfds_t i = 0, found = 0; i < n; i++) {
        fds[i].revents = sim_fd_readable(p, fds[i].fd) ? POLLIN : 0;
        ready = (int)(found += fds[i].revents != 0);
    }
    return ready;
}

/* -- processes -- */

int io_worker_main(int argc, char **argv);
int gpu_worker_main(int argc, char **argv);
int opt_worker_main(int argc, char **argv);

static int worker_entry(struct sim_process *p)
{
    p->argv[0] = p->argv_text[0];
    int (*mains[])(int, char **) = {
        [ROLE_IO] = io_worker_main, [ROLE_GPU] = gpu_worker_main, [ROLE_OPT] = opt_worker_main};
    return mains[p->role](p->argc, p->argv);
}

int child_start(struct child *child, int segment_fd)
{
    sim_yield();
    if (sim_refuses(REFUSE_CHILD))
        return error_set(ERROR_FAILED, "fork: %s", strerror(EAGAIN));
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        const struct sim_process *other = &sim.processes[i];
        if (other->role == child->role && other->index == child->index &&
            (other->state == SIM_RUNNABLE || other->state == SIM_SLEEPING))
            sim_violation("%s.%u is started beside pid %d, which lives",
                          topology_role_name(child->role), child->index, other->pid);
    }
    struct sim_process *p = sim_spawn(child->role, child->index, worker_entry);
    struct sim_fd *segment = sim_fd_get(segment_fd);
    p->fds[segment_fd] = *segment;
    segment_refs[segment->object]++;
    (void)snprintf(p->argv_text[0], sizeof p->argv_text[0], "%d", segment_fd);
    (void)snprintf(p->argv_text[1], sizeof p->argv_text[1], "%u", child->index);
    p->argc = 3;
    p->argv[1] = p->argv_text[0];
    p->argv[2] = p->argv_text[1];
    child->pid = p->pid;
    child->pid_fd = sim_fd_new(FD_PID, p->pid);
    child->state = CHILD_RUNNING;
    child->heartbeat = child->asleep_ns = child->paused_ns = 0;
    child->abort_ns = child->kill_ns = 0;
    child->verdict[0] = '\0';
    child->alive_ns = sim.now_ns;
    return 0;
}

pid_t sim_waitpid(pid_t pid, int *status, int options);
pid_t sim_waitpid(pid_t pid, int *status, int options)
{
    struct sim_process *p = sim_find(pid);
    (void)options;
    if (!p || p->parent != sim_self()->pid) {
        errno = ECHILD;
        return -1;
    }
    if (p->state != SIM_ZOMBIE)
        return 0;
    *status = p->status;
    p->state = SIM_FREE;
    return pid;
}

/* pidfd_send_signal. A signal that ends reaches a stopped process too, if it is SIGKILL. */
static long send_signal(int pid_fd, int number)
{
    const struct sim_fd *f = sim_fd_get(pid_fd);
    struct sim_process *p = f ? sim_find(f->object) : NULL;
    if (!p || p->state == SIM_ZOMBIE) {
        errno = ESRCH;
        return -1;
    }
    if (number == SIGKILL || p->stopped_until_ns <= sim.now_ns)
        sim_doom(p, 1);
    return 0;
}

long sim_syscall(long number, ...);
long sim_syscall(long number, ...)
{
    va_list args;
    va_start(args, number);
    int first = va_arg(args, int), second = va_arg(args, int);
    va_end(args);
    if (number == SYS_pidfd_send_signal)
        return send_signal(first, second);
    errno = ENOSYS;
    return -1;
}

pid_t sim_getpid(void);
pid_t sim_getpid(void)
{
    return sim_self()->pid;
}

pid_t sim_getppid(void);
pid_t sim_getppid(void)
{
    return sim_self()->parent;
}

int sim_prctl(int option, ...);
int sim_prctl(int option, ...)
{
    (void)option;
    return 0;
}

typedef void handler(int);
handler *sim_signal(int number, handler *action);
handler *sim_signal(int number, handler *action)
{
    (void)number;
    (void)action;
    return NULL;
}

ssize_t sim_getrandom(void *out, size_t n, unsigned flags);
ssize_t sim_getrandom(void *out, size_t n, unsigned flags)
{
    (void)flags;
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)out)[i] = (unsigned char)sim_random();
    return (ssize_t)n;
}

_Noreturn void check_failed(const char *file, int line, const char *function, const char *condition)
{
    struct sim_process *p = sim_self();
    if (p && p->panic)
        (void)snprintf(p->panic, p->panic_bytes, "CHECK(%s) failed", condition);
    sim_violation("%s:%d: %s: CHECK(%s) failed in %s", file, line, function, condition,
                  p ? topology_role_name(p->role) : "sim");
    if (!p)
        abort();
    sim_abort();
}

void check_set_panic_buffer(char *buffer, size_t bytes)
{
    sim_self()->panic = buffer;
    sim_self()->panic_bytes = bytes;
}

/* Workers of this run whose launcher is gone, as /proc would show them: ended, and waited for. */
int orphans_mark(const uint8_t id[RUN_ID_BYTES])
{
    (void)id;
    return 0;
}

int orphans_end(const uint8_t id[RUN_ID_BYTES])
{
    int n = 0;
    (void)id;
    sim_yield();
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        struct sim_process *p = &sim.processes[i];
        if (p->role == ROLE_LAUNCHER || p->parent != 1 ||
            (p->state != SIM_RUNNABLE && p->state != SIM_SLEEPING))
            continue;
        const struct timespec wait = {ORPHAN_WAIT_S, 0};
        if (sim_is_stuck(p))
            (void)sim_nanosleep(&wait, NULL);
        if (sim_is_stuck(p))
            return error_set(ERROR_BUSY, "process %d of a dead launcher cannot be killed", p->pid);
        if (p->state != SIM_RUNNABLE && p->state != SIM_SLEEPING)
            continue; /* it ended meanwhile */
        sim_kill(p, SIGKILL);
        n++;
    }
    return n;
}

int lifeline_is_cut(void)
{
    return sim_self()->parent == 1;
}

/* -- shared memory -- */

unsigned char *sim_segment_bytes(int object, uint64_t *bytes)
{
    *bytes = SEGMENT_BYTES;
    return segments[object];
}

int sim_segment_of(const unsigned char *at, const unsigned char **memory)
{
    for (int i = 0; i < SEGMENTS_MAX; i++)
        if (at >= segments[i] && at < segments[i] + SEGMENT_BYTES) {
            *memory = segments[i];
            return i;
        }
    return -1;
}

int sim_segment_new(void)
{
    for (int i = 0; i < SEGMENTS_MAX; i++)
        if (segment_refs[i] == 0 && !sim_segment_busy(segments[i], SEGMENT_BYTES)) {
            segment_refs[i] = 1;
            newest_segment = i;
            sim_frames_forget(i);
            sim_on_session();
            return sim_fd_new(FD_SHARED, i);
        }
    sim_violation("sim: more than %d segments", SEGMENTS_MAX);
    errno = ENOMEM;
    return -1;
}

int sim_shm_open(const char *name, int flags, mode_t mode);
int sim_shm_open(const char *name, int flags, mode_t mode)
{
    (void)name;
    (void)flags;
    (void)mode;
    return sim_segment_new();
}

void *sim_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *sim_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    const struct sim_fd *f = sim_fd_get(fd);
    (void)at;
    (void)bytes;
    (void)protection;
    (void)flags;
    return f && f->kind == FD_SHARED ? segments[f->object] + offset : MAP_FAILED;
}

static unsigned flip(unsigned char *at, uint64_t bytes)
{
    at[sim_below(bytes)] ^= 1u << sim_below(8);
    return 1;
}

/* A descriptor that waits to be consumed; or the cursor that says how many do, so that old ones
 * seem to. */
static unsigned scribble_ring(unsigned char *memory, const struct plan *plan)
{
    for (int tries = 0; tries < 8; tries++) {
        uint64_t r = sim_below(RING_COUNT);
        uint64_t i = sim_below(plan->ring_producers[r].instances);
        unsigned char *at = memory + plan->ring_producers[r].offset;
        struct ring_producer_area *p = (void *)(at + plan->ring_producers[r].stride * i);
        at = memory + plan->ring_consumers[r].offset + plan->ring_consumers[r].stride * i;
        const struct ring_consumer_area *c = (const void *)at;
        uint64_t waiting = p->head - c->tail;
        if (sim_chance(3)) {
            p->head ^= 1u << sim_below(4);
            sim_trace("scribble: head of ring %s: %llu", topology_rings[r].name,
                      (unsigned long long)p->head);
            return 1;
        }
        if (waiting == 0 || waiting > plan->ring_depth[r])
            continue;
        uint64_t chosen = (c->tail + sim_below(waiting)) & (plan->ring_depth[r] - 1);
        sim_trace("scribble: ring %s", topology_rings[r].name);
        return flip((unsigned char *)&p->descriptors[chosen], sizeof p->descriptors[0]);
    }
    return 0;
}

static int has_segment(const struct plan *plan)
{
    return segment_refs[newest_segment] > 0 && plan->magic == PLAN_MAGIC;
}

const struct plan *sim_newest_plan(void)
{
    const struct plan *plan = (const void *)segments[newest_segment];
    return has_segment(plan) ? plan : NULL;
}

unsigned sim_scribble_ring(void)
{
    unsigned char *memory = segments[newest_segment];
    const struct plan *plan = (const void *)memory;
    return has_segment(plan) ? scribble_ring(memory, plan) : 0;
}

/* What io_worker tells of where it is. */
static unsigned scribble_control(unsigned char *memory, const struct plan *plan)
{
    struct worker_control *io = (void *)(memory + plan->regions[REGION_IO_CONTROL].offset);
    _Atomic uint64_t *facts[] = {&io->complete_step, &io->committed_step, &io->exported_step};
    *facts[sim_below(3)] ^= (uint64_t)1 << sim_below(4);
    sim_trace("scribble: control page, complete %llu, committed %llu, exported %llu",
              (unsigned long long)io->complete_step, (unsigned long long)io->committed_step,
              (unsigned long long)io->exported_step);
    return 1;
}

unsigned sim_scribble_of_opt(uint32_t index)
{
    unsigned char *memory = segments[newest_segment];
    const struct plan *plan = (const void *)memory;
    if (!has_segment(plan) || index >= plan->opt_workers)
        return 0;
    const struct plan_region *norms = &plan->regions[REGION_NORM];
    struct norm_entry *entries = (void *)(memory + norms->offset + norms->stride * index);
    sim_trace("scribble: norm of opt_worker.%u", index);
    entries[0].step ^= (uint64_t)1 << sim_below(4);
    return 1;
}

unsigned sim_scribble_of_io(void)
{
    unsigned char *memory = segments[newest_segment];
    const struct plan *plan = (const void *)memory;
    if (!has_segment(plan))
        return 0;
    if (sim_chance(3))
        return scribble_control(memory, plan);
    if (sim_chance(2)) {
        sim_trace("scribble: page table");
        return flip(memory + plan->regions[REGION_PAGE_TABLE].offset +
                        PAGE_TABLE_STATES * PAGE_TABLE_STATE_BYTES,
                    (uint64_t)PAGE_TABLE_PLACES * sim_layout.n_pages * PAGE_TABLE_ENTRY_BYTES);
    }
    const struct plan_pool *pool = &plan->pools[REGION_WEIGHTS_POOL];
    uint64_t page = sim_below(sim_layout.n_pages);
    sim_trace("scribble: WEIGHTS frame of page %llu", (unsigned long long)page);
    return flip(memory + plan->regions[REGION_WEIGHTS_POOL].offset + pool->stride * page,
                sim_layout.pages[page].elements * (plan->bf16 ? 2 : 4));
}

/* -- what is there and does nothing -- */

int sim_munmap(void *p, size_t n);
int sim_munmap(void *p, size_t n)
{
    (void)p;
    (void)n;
    return 0;
}
int sim_fchmod(int fd, mode_t mode);
int sim_fchmod(int fd, mode_t mode)
{
    (void)fd;
    (void)mode;
    return 0;
}
int sim_unlinkat(int fd, const char *path, int flags);
int sim_unlinkat(int fd, const char *path, int flags)
{
    (void)fd;
    (void)path;
    (void)flags;
    errno = ENOENT;
    return -1;
}
int sim_madvise(void *p, size_t n, int advice);
int sim_madvise(void *p, size_t n, int advice)
{
    (void)p;
    (void)n;
    (void)advice;
    return 0;
}
int sim_shm_unlink(const char *name);
int sim_shm_unlink(const char *name)
{
    (void)name;
    return 0;
}
char *sim_mkdtemp(char *template);
char *sim_mkdtemp(char *template)
{
    size_t n = strlen(template);
    if (sim_refuses(REFUSE_SOCKET)) {
        errno = ENOSPC;
        return NULL;
    }
    (void)snprintf(template + n - 6, 7, "%06llx", (unsigned long long)(sim_random() & 0xffffff));
    return template;
}
/* launcher/socket_dir.c: its sockets are the kernel's, and none is left here */
void socket_dir_remove_dead(const char *directory, int age_s)
{
    (void)directory;
    (void)age_s;
}
void socket_dir_sweep(void) {}
int socket_dir_is_there(const char *endpoint)
{
    (void)endpoint;
    return 1;
}
DIR *sim_opendir(const char *path);
DIR *sim_opendir(const char *path)
{
    (void)path;
    return NULL;
}
int sim_rmdir(const char *path);
int sim_rmdir(const char *path)
{
    (void)path;
    return 0;
}
