/*
 * Looks into a live run from outside: maps the launcher's shared segment read-only, through
 * /proc/PID/fd, and says what the workers are doing. With `kill` it waits for a moment first.
 *
 *     probe PID state
 *     probe PID places                                       where each region and ring lies
 *     probe PID stopping        tells the workers to leave, as the launcher would, in its place
 *     probe PID kill ROLE[.I] SIGNAL GENERATION WHEN DELAY_US
 *
 * WHEN is "step:N" (all are READY, step N has begun), "export" (one is being written) or
 * "activity:NAME" (io_worker does that), and GENERATION the least life of the segment that counts.
 * One JSON line is printed: what was going on at the last look before the signal. Exit status 3:
 * the run ended before that moment came.
 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ipc/control.h"
#include "ipc/plan.h"
#include "ipc/topology.h"

enum { GONE = 3, POLL_US = 50 };

struct view {
    int pid;
    char path[400]; /* of the segment */
    char *base;
    size_t bytes;
    const struct plan *plan;
    const struct launcher_control *orders;
    const struct worker_control *io, *gpu;
};

static const char *const activities[] = {
#define X(name, text) #name,
    WORKER_ACTIVITY_LIST(X)
#undef X
};

static uint64_t get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire);
}

static const void *region(const struct view *v, enum region_id id, uint32_t instance)
{
    const struct plan_region *at = &v->plan->regions[id];
    return v->base + at->offset + at->stride * instance;
}

static const struct worker_control *opt(const struct view *v, uint32_t i)
{
    return region(v, REGION_OPT_CONTROL, i);
}

static void leave(struct view *v)
{
    if (v->base)
        (void)munmap(v->base, v->bytes);
    v->base = NULL;
}

/* The launcher fills the segment before it starts anybody: a plan with its magic is whole. */
static int map_file(struct view *v, const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    void *p = MAP_FAILED;
    if (fstat(fd, &st) == 0 && (size_t)st.st_size >= sizeof(struct plan))
        p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (p == MAP_FAILED)
        return 0;
    (void)snprintf(v->path, sizeof v->path, "%s", path);
    v->base = p;
    v->bytes = (size_t)st.st_size;
    v->plan = p;
    if (v->plan->magic != PLAN_MAGIC || v->plan->segment_bytes != v->bytes) {
        leave(v);
        return 0;
    }
    v->orders = region(v, REGION_LAUNCHER_CONTROL, 0);
    v->io = region(v, REGION_IO_CONTROL, 0);
    v->gpu = region(v, REGION_GPU_CONTROL, 0);
    return 1;
}

/* 1 mapped, 0 no segment now, -1 the process is gone. */
static int look(struct view *v)
{
    char directory[64], path[400], target[256];
    (void)snprintf(directory, sizeof directory, "/proc/%d/fd", v->pid);
    DIR *d = opendir(directory);
    if (!d)
        return -1;
    int found = 0, seen = 0;
    for (struct dirent *e; !found && (e = readdir(d));) {
        (void)snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n <= 0)
            continue;
        seen++;
        target[n] = '\0';
        if (strncmp(target, "/dev/shm/#", 10) == 0)
            found = map_file(v, path);
    }
    (void)closedir(d);
    return found ? 1 : seen ? 0 : -1; /* a zombie has a directory without files */
}

/* -- what goes on -- */

/* A new segment has one, and so has each restart of one worker in it. */
static uint32_t generation_of(const struct view *v)
{
    uint32_t now = atomic_load(&v->orders->abort_generation);
    return now > v->plan->generation ? now : v->plan->generation;
}

static int all_ready(const struct view *v)
{
    return atomic_load(&v->orders->running_generation) == generation_of(v);
}

static const char *phase_of_update(const struct view *v)
{
    uint64_t applied = get(&v->orders->apply_step), complete = get(&v->io->complete_step);
    uint64_t norm = UINT64_MAX;
    for (uint32_t i = 0; i < v->plan->opt_workers; i++)
        if (get(&opt(v, i)->norm_step) < norm)
            norm = get(&opt(v, i)->norm_step);
    if (get(&v->io->committed_step) < complete)
        return "commit";
    if (complete < applied)
        return "apply";
    if (get(&v->gpu->backward_step) > applied)
        return "norm";
    return "";
}

static const char *phase_of_device(const struct view *v)
{
    uint64_t begun = get(&v->orders->begin_step);
    if (begun > get(&v->gpu->forward_step))
        return "forward";
    return begun > get(&v->gpu->backward_step) ? "backward" : "";
}

static void print_state(const struct view *v)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)printf("{\"at\": %lld.%09ld, ", (long long)now.tv_sec, now.tv_nsec);
    (void)printf("\"generation\": %u, \"ready\": %d, \"activity\": \"%s\", \"begun\": %llu, "
                 "\"committed\": %llu, \"device\": \"%s\", \"update\": \"%s\", "
                 "\"segment_bytes\": %llu, \"device_bytes\": %llu, \"store_bytes\": %llu, "
                 "\"io\": %d, \"gpu\": %d, \"pids\": [",
                 generation_of(v), all_ready(v),
                 activities[atomic_load(&v->io->progress.activity) % ACTIVITY_COUNT],
                 (unsigned long long)get(&v->orders->begin_step),
                 (unsigned long long)get(&v->io->committed_step), phase_of_device(v),
                 phase_of_update(v), (unsigned long long)v->plan->segment_bytes,
                 (unsigned long long)v->gpu->device_bytes, (unsigned long long)v->io->store_bytes,
                 v->io->pid, v->gpu->pid);
    for (uint32_t i = 0; i < v->plan->opt_workers; i++)
        (void)printf("%s%d", i ? ", " : "", opt(v, i)->pid);
    (void)printf("], \"pages_updated\": [");
    for (uint32_t i = 0; i < v->plan->opt_workers; i++)
        (void)printf("%s%llu", i ? ", " : "", (unsigned long long)get(&opt(v, i)->pages_updated));
    (void)printf("], \"pages\": %llu}\n",
                 (unsigned long long)(v->plan->pools[REGION_WEIGHTS_POOL].frames));
}

static void print_place(const char *name, const struct plan_region *at, const char *const *access)
{
    static const char *comma = "";
    (void)printf("%s{\"name\": \"%s\", \"offset\": %llu, \"stride\": %llu, \"instances\": %llu, ",
                 comma, name, (unsigned long long)at->offset, (unsigned long long)at->stride,
                 (unsigned long long)at->instances);
    (void)printf("\"launcher\": \"%s\", \"io_worker\": \"%s\", \"gpu_worker\": \"%s\", "
                 "\"opt_worker\": \"%s\"}",
                 access[ROLE_LAUNCHER], access[ROLE_IO], access[ROLE_GPU], access[ROLE_OPT]);
    comma = ", ";
}

static void print_places(const struct view *v)
{
    (void)printf("[");
    for (int r = 0; r < REGION_COUNT; r++)
        print_place(topology_regions[r].name, &v->plan->regions[r], topology_regions[r].access);
    for (int r = 0; r < RING_COUNT; r++) {
        const struct ring_row *row = &topology_rings[r];
        const char *producer[ROLE_COUNT] = {"-", "-", "-", "-"};
        const char *consumer[ROLE_COUNT] = {"-", "-", "-", "-"};
        char name[64];
        producer[row->from] = consumer[row->to] = "w";
        producer[row->to] = consumer[row->from] = "r";
        (void)snprintf(name, sizeof name, "%s.producer", row->name);
        print_place(name, &v->plan->ring_producers[r], producer);
        (void)snprintf(name, sizeof name, "%s.consumer", row->name);
        print_place(name, &v->plan->ring_consumers[r], consumer);
    }
    (void)printf("]\n");
}

/* -- the moment -- */

static int moment_has_come(const struct view *v, uint32_t generation, const char *when)
{
    if (generation_of(v) < generation)
        return 0;
    if (strncmp(when, "step:", 5) == 0)
        return all_ready(v) && get(&v->orders->begin_step) >= strtoull(when + 5, NULL, 10);
    if (strcmp(when, "export") == 0)
        return all_ready(v) && get(&v->orders->export_step) > get(&v->io->exported_step);
    const char *now = activities[atomic_load(&v->io->progress.activity) % ACTIVITY_COUNT];
    return v->io->pid != 0 && strcmp(now, when + strlen("activity:")) == 0;
}

/* Polls; a segment that stays as it is while its launcher has a new one is looked for again. */
static int wait_for(struct view *v, uint32_t generation, const char *when)
{
    for (uint64_t turn = 0;; turn++) {
        if (!v->base || turn % 200 == 199) {
            struct view next = {.pid = v->pid};
            int rc = look(&next);
            if (rc < 0)
                return GONE;
            if (rc > 0) {
                leave(v);
                *v = next;
            }
        }
        if (v->base && moment_has_come(v, generation, when))
            return 0;
        (void)usleep(POLL_US);
    }
}

static int pid_of(const struct view *v, const char *role)
{
    const char *dot = strchr(role, '.');
    if (strcmp(role, "launcher") == 0)
        return v->pid;
    if (strcmp(role, "io_worker") == 0)
        return v->io->pid;
    if (strcmp(role, "gpu_worker") == 0)
        return v->gpu->pid;
    uint32_t i = dot ? (uint32_t)strtoul(dot + 1, NULL, 10) : 0;
    return i < v->plan->opt_workers ? opt(v, i)->pid : 0;
}

static int kill_command(struct view *v, char **argv)
{
    uint32_t generation = (uint32_t)strtoul(argv[5], NULL, 10);
    int rc = wait_for(v, generation, argv[6]);
    if (rc != 0)
        return rc;
    (void)usleep((useconds_t)strtoul(argv[7], NULL, 10));
    int pid = pid_of(v, argv[3]);
    if (pid <= 0) {
        (void)fprintf(stderr, "probe: %s has no pid yet\n", argv[3]);
        return 1;
    }
    print_state(v);
    return kill(pid, atoi(argv[4])) < 0 ? GONE : 0;
}

/* For a launcher that is frozen and cannot do it itself. */
static int stopping_command(const struct view *v)
{
    const struct plan_region *at = &v->plan->regions[REGION_LAUNCHER_CONTROL];
    int fd = open(v->path, O_RDWR | O_CLOEXEC);
    void *p = mmap(NULL, at->stride, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)at->offset);
    (void)close(fd);
    if (p == MAP_FAILED) {
        perror("probe: mmap");
        return 1;
    }
    struct launcher_control *orders = p;
    atomic_store(&orders->stopping, 1);
    print_state(v);
    return 0;
}

int main(int argc, char **argv)
{
    struct view v = {.pid = argc > 2 ? atoi(argv[1]) : 0};
    if (argc == 8 && strcmp(argv[2], "kill") == 0)
        return kill_command(&v, argv);
    if (argc != 3 || (strcmp(argv[2], "state") != 0 && strcmp(argv[2], "places") != 0 &&
                      strcmp(argv[2], "stopping") != 0)) {
        (void)fprintf(
            stderr,
            "probe PID state|places|stopping|kill ROLE[.I] SIGNAL GENERATION WHEN DELAY_US\n");
        return 2;
    }
    if (look(&v) <= 0)
        return GONE;
    if (strcmp(argv[2], "stopping") == 0)
        return stopping_command(&v);
    if (argv[2][0] == 's')
        print_state(&v);
    else
        print_places(&v);
    return 0;
}
