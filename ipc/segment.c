#include "ipc/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "procs/check.h"
#include "procs/error.h"
#include "procs/mutant.h"

static int shm_room(uint64_t need)
{
    struct statvfs fs;
    if (statvfs("/dev/shm", &fs) < 0)
        return error_set(ERROR_FAILED, "/dev/shm: %s", strerror(errno));
    uint64_t have = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (have < need) {
        (void)error_set(ERROR_FIT, "/dev/shm: need %llu bytes of shared memory, have %llu",
                        (unsigned long long)need, (unsigned long long)have);
        return error_hint(
            "enlarge it (mount -o remount,size=... /dev/shm; docker run --shm-size=...)");
    }
    return 0;
}

static int write_at(int fd, const void *bytes, uint64_t n, uint64_t offset)
{
    const char *from = bytes;
    for (uint64_t done = 0; done < n;) {
        ssize_t k = pwrite(fd, from + done, n - done, (off_t)(offset + done));
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return error_set(ERROR_FAILED, "shared memory: write: %s", strerror(errno));
        done += (uint64_t)k;
    }
    return 0;
}

/* The plan as its maker filled it, then what only this process knows, then its check. */
static int write_plan(int fd, const struct plan *plan)
{
    int32_t pid = (int32_t)getpid(); /* the workers check that it is their parent */
    if (write_at(fd, plan, plan->bytes, 0) < 0 ||
        write_at(fd, &pid, sizeof pid, offsetof(struct plan, launcher_pid)) < 0)
        return -(int)error_kind_now();
    const struct plan *written = mmap(NULL, plan->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (written == MAP_FAILED)
        return error_set(ERROR_FAILED, "shared memory: mmap of the plan: %s", strerror(errno));
    uint64_t check = plan_check(written);
    (void)munmap((void *)(uintptr_t)written, plan->bytes); /* our own mapping */
    return write_at(fd, &check, sizeof check, offsetof(struct plan, check));
}

int segment_create(const struct plan *plan, int *fd)
{
    CHECK(plan->regions[REGION_PLAN].offset == 0 && plan->segment_bytes > 0);
    if (shm_room(plan->segment_bytes) < 0)
        return -(int)error_kind_now();
    /* never had a name, and O_EXCL: nobody can give it one */
    *fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (*fd < 0) {
        (void)error_set(ERROR_FAILED, "/dev/shm: cannot make a nameless file: %s", strerror(errno));
        return error_hint("a tmpfs must be mounted there");
    }
    int rc;
    while ((rc = posix_fallocate(*fd, 0, (off_t)plan->segment_bytes)) == EINTR)
        ; /* a signal undoes it on tmpfs */
    if (rc != 0) {
        (void)close(*fd);
        if (rc == ENOSPC && shm_room(plan->segment_bytes) < 0) /* taken since we looked */
            return -(int)error_kind_now();
        return error_set(rc == ENOSPC || rc == ENOMEM ? ERROR_FIT : ERROR_FAILED,
                         "/dev/shm: allocating %llu bytes of shared memory: %s",
                         (unsigned long long)plan->segment_bytes, strerror(rc));
    }
    if (write_plan(*fd, plan) < 0) {
        (void)close(*fd);
        return -(int)error_kind_now();
    }
    return 0;
}

/* Whether this process maps this instance, and how. */
static int protection(const struct segment *s, const char *access, int per_worker,
                      uint32_t instance)
{
    if (access[0] == '-' || (s->role == ROLE_OPT && per_worker && instance != s->index))
        return PROT_NONE;
    return access[0] == 'w' ? PROT_READ | PROT_WRITE : PROT_READ;
}

static int map(const struct segment *s, const struct plan_region *at, uint32_t instance, int prot,
               void **out)
{
    *out = NULL;
    if (prot == PROT_NONE || at->stride == 0)
        return 0;
    void *p = mmap(NULL, at->stride, prot, MAP_SHARED, s->fd,
                   (off_t)(at->offset + at->stride * instance));
    if (p == MAP_FAILED)
        return error_set(ERROR_FAILED, "shared memory: mmap of %llu bytes: %s",
                         (unsigned long long)at->stride, strerror(errno));
    (void)madvise(p, at->stride, MADV_DONTDUMP); /* cores of gigabytes help nobody; optional */
    *out = p;
    return 0;
}

static int map_rings(struct segment *s)
{
    for (int r = 0; r < RING_COUNT; r++) {
        const struct ring_row *row = &topology_rings[r];
        const char *producer = row->from == s->role ? "w" : row->to == s->role ? "r" : "-";
        const char *consumer = row->to == s->role ? "w" : row->from == s->role ? "r" : "-";
        for (uint32_t i = 0; i < s->plan->ring_producers[r].instances; i++) {
            int p = protection(s, producer, row->per_worker, i);
            int c = protection(s, consumer, row->per_worker, i);
            if (map(s, &s->plan->ring_producers[r], i, p, &s->producers[r][i]) < 0 ||
                map(s, &s->plan->ring_consumers[r], i, c, &s->consumers[r][i]) < 0)
                return error_wrap("ring %s", row->name);
        }
    }
    return 0;
}

static int map_regions(struct segment *s)
{
    for (int r = 0; r < REGION_COUNT; r++) {
        const struct region_row *row = &topology_regions[r];
        for (uint32_t i = 0; i < s->plan->regions[r].instances; i++) {
            int prot = protection(s, row->access[s->role], row->per_worker, i);
            if (map(s, &s->plan->regions[r], i, prot, &s->regions[r][i]) < 0)
                return error_wrap("region %s", row->name);
        }
    }
    return 0;
}

static int place_is_inside(const struct plan *plan, const struct plan_region *at, int per_worker)
{
    uint64_t end = plan->segment_bytes, page = RING_CURSOR_BYTES;
    return at->instances == (per_worker ? plan->opt_workers : 1) && at->offset % page == 0 &&
           at->stride % page == 0 && at->offset <= end &&
           (at->instances == 0 || at->stride <= (end - at->offset) / at->instances);
}

/* A damaged plan is refused here, before it can make this process write outside its arrays. */
static int check_places(const struct plan *plan)
{
    for (int r = 0; r < REGION_COUNT; r++)
        if (!place_is_inside(plan, &plan->regions[r], topology_regions[r].per_worker) ||
            (plan->pools[r].frames != 0 &&
             plan->pools[r].stride > plan->regions[r].stride / plan->pools[r].frames))
            return error_set(ERROR_FAILED,
                             "shared memory: region %s lies outside the segment of %llu bytes",
                             topology_regions[r].name, (unsigned long long)plan->segment_bytes);
    for (int r = 0; r < RING_COUNT; r++) {
        const struct plan_region *at = &plan->ring_producers[r];
        uint64_t depth = plan->ring_depth[r], per_worker = (uint64_t)topology_rings[r].per_worker;
        if (!place_is_inside(plan, at, (int)per_worker) ||
            !place_is_inside(plan, &plan->ring_consumers[r], (int)per_worker) ||
            (depth & (depth - 1)) != 0 || at->stride < RING_CURSOR_BYTES ||
            plan->ring_consumers[r].stride < RING_CURSOR_BYTES ||
            depth > (at->stride - RING_CURSOR_BYTES) / RING_LINE_BYTES)
            return error_set(ERROR_FAILED,
                             "shared memory: ring %s lies outside the segment of %llu bytes",
                             topology_rings[r].name, (unsigned long long)plan->segment_bytes);
    }
    return 0;
}

/* The plan's own size is not known before it is read: a first look at its head. */
static int map_plan(struct segment *s)
{
    struct plan head;
    struct stat st;
    ssize_t n = pread(s->fd, &head, sizeof head, 0);
    if (n < 0 || fstat(s->fd, &st) < 0)
        return error_set(ERROR_FAILED, "shared memory: cannot read the plan: %s", strerror(errno));
    if (n != (ssize_t)sizeof head)
        return error_set(ERROR_FAILED, "shared memory: expected a plan of %zu bytes, found %zd",
                         sizeof head, n);
    if (head.magic != PLAN_MAGIC || head.layout_version != PLAN_LAYOUT_VERSION)
        return error_set(ERROR_FAILED,
                         "shared memory: expected plan %llx version %d, found %llx version %u",
                         (unsigned long long)PLAN_MAGIC, PLAN_LAYOUT_VERSION,
                         (unsigned long long)head.magic, head.layout_version);
    if (head.segment_bytes != (uint64_t)st.st_size)
        return error_set(ERROR_FAILED,
                         "shared memory: the plan says %llu bytes, the segment has %llu",
                         (unsigned long long)head.segment_bytes, (unsigned long long)st.st_size);
    if (head.opt_workers > OPT_WORKERS_MAX || (s->role == ROLE_OPT && s->index >= head.opt_workers))
        return error_set(ERROR_FAILED, "shared memory: opt_worker %u of %u, at most %d expected",
                         s->index, head.opt_workers, OPT_WORKERS_MAX);
    if (check_places(&head) < 0)
        return -(int)error_kind_now();
    if (head.bytes < sizeof head || head.bytes > head.regions[REGION_PLAN].stride)
        return error_set(ERROR_FAILED, "shared memory: a plan of %llu bytes, expected %zu to %llu",
                         (unsigned long long)head.bytes, sizeof head,
                         (unsigned long long)head.regions[REGION_PLAN].stride);
    void *p = mmap(NULL, head.bytes, PROT_READ, MAP_SHARED, s->fd, 0);
    if (p == MAP_FAILED)
        return error_set(ERROR_FAILED, "shared memory: mmap of the plan: %s", strerror(errno));
    s->plan = p;
    s->generation = s->plan->generation;
    if (plan_check(s->plan) == s->plan->check)
        return 0;
    (void)munmap(p, head.bytes); /* our own mapping */
    s->plan = NULL;
    return error_set(ERROR_FAILED, "shared memory: the plan is damaged: its check does not match");
}

static void unmap(void **p, uint64_t bytes)
{
    if (*p)
        (void)munmap(*p, bytes); /* our own mapping */
    *p = NULL;
}

static void unmap_all(struct segment *s)
{
    for (int r = 0; r < REGION_COUNT; r++)
        for (uint32_t i = 0; i < OPT_WORKERS_MAX; i++)
            unmap(&s->regions[r][i], s->plan->regions[r].stride);
    for (int r = 0; r < RING_COUNT; r++)
        for (uint32_t i = 0; i < OPT_WORKERS_MAX; i++) {
            unmap(&s->producers[r][i], s->plan->ring_producers[r].stride);
            unmap(&s->consumers[r][i], s->plan->ring_consumers[r].stride);
        }
    (void)munmap((void *)(uintptr_t)s->plan, s->plan->bytes); /* our own mapping */
    s->plan = NULL;
    free(s->own);
    s->own = NULL;
}

int segment_attach(struct segment *s, int fd, enum role role, uint32_t index)
{
    memset(s, 0, sizeof *s);
    s->fd = fd;
    s->role = role;
    s->index = index;
    if (map_plan(s) < 0)
        return -(int)error_kind_now();
    s->own = calloc(1, sizeof *s->own);
    if (!s->own)
        (void)error_set(ERROR_FAILED, "shared memory: out of memory");
    if (!s->own || map_regions(s) < 0 || map_rings(s) < 0) {
        unmap_all(s);
        return -(int)error_kind_now();
    }
    return 0;
}

void segment_detach(struct segment *s)
{
    if (!s->plan)
        return;
    unmap_all(s);
    (void)close(s->fd);
}

void *segment_region(const struct segment *s, enum region_id region, uint32_t instance)
{
    CHECK(instance < OPT_WORKERS_MAX && s->regions[region][instance]);
    return s->regions[region][instance];
}

void *segment_frame(const struct segment *s, enum region_id pool, uint32_t instance, uint32_t frame)
{
    CHECK(frame < s->plan->pools[pool].frames);
    return (char *)segment_region(s, pool, instance) + s->plan->pools[pool].stride * frame;
}

void segment_ring(const struct segment *s, enum ring_id ring, uint32_t instance, struct ring *out)
{
    CHECK(s->producers[ring][instance] && s->consumers[ring][instance]);
    out->producer = s->producers[ring][instance];
    out->consumer = s->consumers[ring][instance];
    out->depth = s->plan->ring_depth[ring];
    out->generation = s->generation;
    out->own = &s->own->of[ring][instance];
    enum region_id pool = topology_rings[ring].pool;
    out->frames = (uint32_t)s->plan->pools[pool].frames;
    out->out_frames =
        pool == REGION_STATE_POOL ? (uint32_t)s->plan->pools[REGION_OUT_POOL].frames : 0;
}

/* The cursor that this process writes, or NULL where it is no end of this ring. */
static _Atomic uint64_t *own_cursor(const struct segment *s, int r, uint32_t i)
{
    struct ring_producer_area *producer = s->producers[r][i];
    struct ring_consumer_area *consumer = s->consumers[r][i];
    if (producer && topology_rings[r].from == s->role)
        return &producer->head;
    return consumer && topology_rings[r].to == s->role ? &consumer->tail : NULL;
}

int segment_check_rings(const struct segment *s)
{
    for (int r = 0; s->own->known && r < RING_COUNT; r++)
        for (uint32_t i = 0; i < s->plan->ring_producers[r].instances; i++) {
            const _Atomic uint64_t *cursor = own_cursor(s, r, i);
            if (!cursor)
                continue;
            uint64_t expected = s->own->of[r][i];
            uint64_t found = atomic_load_explicit(cursor, memory_order_relaxed);
            if (found != expected)
                return error_set(ERROR_DAMAGED, "ring %s: own cursor: expected %llu, found %llu",
                                 topology_rings[r].name, (unsigned long long)expected,
                                 (unsigned long long)found);
        }
    return 0;
}

void segment_reset_rings(const struct segment *s)
{
    if (mutant(MUTANT_no_ring_reset))
        return;
    for (int r = 0; r < RING_COUNT; r++)
        for (uint32_t i = 0; i < s->plan->ring_producers[r].instances; i++) {
            _Atomic uint64_t *cursor = own_cursor(s, r, i);
            /* relaxed: nobody looks before the launcher has heard READY from both ends */
            if (cursor)
                atomic_store_explicit(cursor, 0, memory_order_relaxed);
            s->own->of[r][i] = 0;
        }
    s->own->known = 1;
}
