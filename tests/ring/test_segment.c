/* The segment: what is created, what each role maps of it, and what is refused at attach. */
#include "ipc/segment.h"

#include "tests/ring/ring_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

static struct fixture f;
enum { WORKERS = 3, PAGES_MAX = 1 << 14 };

static int created(void)
{
    int fd = -1;
    fixture_init(&f, WORKERS);
    if (segment_create(&f.at.plan, &fd) < 0)
        fail_msg("%s", error_text());
    return fd;
}

static void done(int fd)
{
    (void)close(fd);
    fixture_destroy(&f);
}

static int entries_in_dev_shm(const char *prefix)
{
    int n = 0;
    DIR *dir = opendir("/dev/shm");
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        n += strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    (void)closedir(dir);
    return n;
}

static int open_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void creation_leaves_nothing_in_dev_shm(void **state)
{
    (void)state;
    char prefix[64];
    struct stat st;
    (void)snprintf(prefix, sizeof prefix, "mtlaunch-%d-", (int)getpid());
    int fd = created();
    assert_int_equal(entries_in_dev_shm(prefix), 0);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_nlink, 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    done(fd);
}

static void every_byte_of_a_segment_is_allocated(void **state)
{
    (void)state;
    struct stat st;
    int fd = created();
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, f.at.plan.segment_bytes);
    assert_true((uint64_t)st.st_blocks * 512 >= f.at.plan.segment_bytes);
    done(fd);
}

static void the_plan_stands_at_its_start_with_the_creators_pid(void **state)
{
    (void)state;
    struct segment s;
    struct plan_text text;
    fixture_fill(&f, WORKERS);
    assert_int_equal(plan_text_add(&f.at.plan, FIXTURE_PLAN_BYTES, "/offload", &text), 0);
    plan_place_regions(&f.at.plan, &f.layout);
    int fd = -1;
    assert_int_equal(segment_create(&f.at.plan, &fd), 0);
    assert_int_equal(segment_attach(&s, fd, ROLE_IO, 0), 0);
    assert_string_equal(plan_text_get(s.plan, text), "/offload");
    assert_int_equal(s.plan->launcher_pid, getpid());
    f.at.plan.launcher_pid = getpid();
    f.at.plan.check = plan_check(&f.at.plan);
    assert_memory_equal(s.plan, &f.at.plan, f.at.plan.bytes);
    segment_detach(&s);
    assert_int_equal(fcntl(fd, F_GETFD), -1); /* detach closes */
    fixture_destroy(&f);
}

static void nobody_can_give_it_a_name(void **state)
{
    (void)state;
    char path[64], target[256], name[64];
    int fd = created();
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    (void)snprintf(name, sizeof name, "/dev/shm/mtlaunch-test-%d", (int)getpid());
    ssize_t n = readlink(path, target, sizeof target - 1);
    assert_true(n > 0);
    target[n] = '\0';
    assert_int_equal(strncmp(target, "/dev/shm/#", 10), 0);
    assert_string_equal(target + n - strlen(" (deleted)"), " (deleted)");
    assert_int_equal(linkat(AT_FDCWD, path, AT_FDCWD, name, AT_SYMLINK_FOLLOW), -1);
    assert_int_equal(errno, ENOENT);
    done(fd);
}

static void a_segment_larger_than_dev_shm_does_not_fit(void **state)
{
    (void)state;
    struct statvfs fs;
    char need[64];
    int fd = -1;
    fixture_init(&f, WORKERS);
    assert_int_equal(statvfs("/dev/shm", &fs), 0);
    f.at.plan.segment_bytes = ((uint64_t)fs.f_blocks + 1) * fs.f_frsize;
    (void)snprintf(need, sizeof need, "need %" PRIu64 " bytes", f.at.plan.segment_bytes);
    int before = open_descriptors();
    assert_int_equal(segment_create(&f.at.plan, &fd), -ERROR_FIT);
    fixture_expect_text(need);
    fixture_expect_text("have ");
    fixture_expect_text("hint: ");
    f.at.plan.segment_bytes = UINT64_MAX - 4095;
    assert_int_equal(segment_create(&f.at.plan, &fd), -ERROR_FIT);
    assert_int_equal(open_descriptors(), before);
    fixture_destroy(&f);
}

static void on_alarm(int signal)
{
    (void)signal;
}

/* tmpfs gives EINTR and takes back what it had allocated. */
static void signals_do_not_disturb_the_allocation(void **state)
{
    (void)state;
    struct sigaction action = {.sa_handler = on_alarm}, old;
    struct stat st;
    pid_t parent = getpid();
    fixture_fill(&f, WORKERS);
    f.at.plan.pools[REGION_WEIGHTS_POOL].frames = 8192; /* 160 MiB: long enough to be hit */
    plan_place_regions(&f.at.plan, &f.layout);
    assert_int_equal(sigaction(SIGUSR1, &action, &old), 0);
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < 10; i++) {
            (void)usleep(2000);
            (void)kill(parent, SIGUSR1);
        }
        _exit(0);
    }
    int fd = -1, rc = segment_create(&f.at.plan, &fd);
    assert_int_equal(fixture_wait(pid), 0);
    (void)sigaction(SIGUSR1, &old, NULL);
    if (rc < 0)
        fail_msg("%s", error_text());
    assert_int_equal(fstat(fd, &st), 0);
    assert_true((uint64_t)st.st_blocks * 512 >= f.at.plan.segment_bytes);
    done(fd);
}

/* -- who maps what -- */

enum { MAPS_READ = 1, MAPS_WRITE = 2, MAPS_OTHER = 4 };

/* What this process maps of the file, page by page, as the kernel tells it. */
static uint64_t read_maps(int fd, unsigned char access[PAGES_MAX])
{
    char line[1024], perms[8];
    uint64_t from, to, offset, inode, lines = 0;
    struct stat st;
    FILE *maps = fopen("/proc/self/maps", "r");
    memset(access, 0, PAGES_MAX);
    if (!maps || fstat(fd, &st) < 0)
        return UINT64_MAX;
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %*s %" SCNu64, &from, &to, perms,
                   &offset, &inode) != 5 ||
            inode != st.st_ino || !strstr(line, "/dev/shm/#"))
            continue;
        int bits = (perms[0] == 'r' ? MAPS_READ : 0) | (perms[1] == 'w' ? MAPS_WRITE : 0) |
                   (perms[2] == 'x' || perms[3] != 's' ? MAPS_OTHER : 0);
        for (uint64_t p = 0; p < (to - from) / 4096 && offset / 4096 + p < PAGES_MAX; p++)
            access[offset / 4096 + p] |= (unsigned char)bits;
        lines++;
    }
    (void)fclose(maps);
    return lines;
}

static void expect_access(unsigned char want[PAGES_MAX], const struct plan_region *at,
                          uint64_t instance, char access)
{
    int bits = access == 'w' ? MAPS_READ | MAPS_WRITE : access == 'r' ? MAPS_READ : 0;
    memset(want + (at->offset + at->stride * instance) / 4096, bits, at->stride / 4096);
}

/* The table once more, in the test's own words: an opt_worker has of PER_WORKER things its own
 * alone. */
static void wanted_access(unsigned char want[PAGES_MAX], enum role role, uint64_t index)
{
    memset(want, 0, PAGES_MAX);
    for (int r = 0; r < REGION_COUNT; r++)
        for (uint64_t i = 0; i < f.at.plan.regions[r].instances; i++) {
            int others = role == ROLE_OPT && topology_regions[r].per_worker && i != index;
            expect_access(want, &f.at.plan.regions[r], i,
                          others ? '-' : topology_regions[r].access[role][0]);
        }
    for (int r = 0; r < RING_COUNT; r++)
        for (uint64_t i = 0; i < f.at.plan.ring_producers[r].instances; i++) {
            const struct ring_row *row = &topology_rings[r];
            int mine = (row->from == role || row->to == role) &&
                       (role != ROLE_OPT || !row->per_worker || i == index);
            char producer = row->from == role ? 'w' : 'r', consumer = row->to == role ? 'w' : 'r';
            expect_access(want, &f.at.plan.ring_producers[r], i, mine ? producer : '-');
            expect_access(want, &f.at.plan.ring_consumers[r], i, mine ? consumer : '-');
        }
}

static int attach_and_compare(int fd, enum role role, uint32_t index)
{
    static unsigned char found[PAGES_MAX], want[PAGES_MAX];
    struct segment s;
    if (segment_attach(&s, fd, role, index) < 0)
        return 2;
    if (read_maps(fd, found) == 0)
        return 3;
    wanted_access(want, role, index);
    for (uint64_t p = 0; p < PAGES_MAX; p++)
        if (found[p] != want[p]) {
            (void)fprintf(stderr, "%s %u: page %" PRIu64 ": access %d, expected %d\n",
                          topology_role_name(role), index, p, found[p], want[p]);
            return 1;
        }
    return 0;
}

static void every_role_maps_exactly_what_the_topology_says(void **state)
{
    (void)state;
    int fd = created();
    assert_true(f.at.plan.segment_bytes / 4096 < PAGES_MAX);
    for (int role = 0; role < ROLE_COUNT; role++)
        for (uint32_t i = 0; i < (role == ROLE_OPT ? WORKERS : 1); i++) {
            pid_t pid = fork();
            if (pid == 0)
                _exit(attach_and_compare(fd, (enum role)role, i));
            assert_int_equal(fixture_wait(pid), 0);
        }
    done(fd);
}

static void detaching_unmaps_everything(void **state)
{
    (void)state;
    static unsigned char access[PAGES_MAX];
    struct segment s;
    int fd = created(), own = dup(fd);
    assert_int_equal(segment_attach(&s, own, ROLE_IO, 0), 0);
    assert_true(read_maps(fd, access) > 0);
    segment_detach(&s);
    assert_int_equal(read_maps(fd, access), 0);
    segment_detach(&s); /* twice does no harm */
    done(fd);
}

static void the_two_ends_of_every_ring_meet(void **state)
{
    (void)state;
    static struct segment ends[ROLE_COUNT + WORKERS];
    int fd = created();
    for (uint32_t i = 0; i < WORKERS + 3; i++) {
        enum role role = i < 3 ? (enum role)i : ROLE_OPT;
        assert_int_equal(segment_attach(&ends[i], dup(fd), role, i < 3 ? 0 : i - 3), 0);
    }
    for (int r = 0; r < RING_COUNT; r++)
        for (uint32_t i = 0; i < (topology_rings[r].per_worker ? WORKERS : 1); i++) {
            const struct ring_row *row = &topology_rings[r];
            struct ring out, in;
            struct ring_descriptor d = {.page = (uint64_t)r * 100 + i}, got;
            segment_ring(&ends[row->from == ROLE_OPT ? 3 + i : row->from], (enum ring_id)r, i,
                         &out);
            segment_ring(&ends[row->to == ROLE_OPT ? 3 + i : row->to], (enum ring_id)r, i, &in);
            for (int n = 0; n < 3 * FIXTURE_DEPTH; n++) {
                assert_int_equal(ring_publish(&out, &d), 0);
                assert_int_equal(ring_consume(&in, &got), 1);
                assert_int_equal(got.page, d.page);
            }
            d.frame = FIXTURE_FRAMES; /* a frame that is not there */
            assert_int_equal(ring_publish(&out, &d), 0);
            assert_int_equal(ring_consume(&in, &got), -ERROR_DAMAGED);
            fixture_expect_text("frame 6, expected one of 6");
        }
    for (uint32_t i = 0; i < WORKERS + 3; i++)
        segment_detach(&ends[i]);
    done(fd);
}

/* A failing memory changes one bit of a cursor: its owner notices, whether it goes on or waits. */
static void a_changed_cursor_is_noticed_by_its_owner(void **state)
{
    (void)state;
    struct segment io, gpu;
    struct ring out, in;
    struct ring_descriptor d = {.page = 1}, got;
    int fd = created();
    assert_int_equal(segment_attach(&io, dup(fd), ROLE_IO, 0), 0);
    assert_int_equal(segment_attach(&gpu, dup(fd), ROLE_GPU, 0), 0);
    for (unsigned bit = 0; bit < 64; bit++) {
        segment_reset_rings(&io);
        segment_reset_rings(&gpu);
        segment_ring(&io, RING_WEIGHTS, 0, &out);
        segment_ring(&gpu, RING_WEIGHTS, 0, &in);
        for (int n = 0; n < FIXTURE_DEPTH; n++)
            assert_int_equal(ring_publish(&out, &d), 0);
        assert_int_equal(ring_consume(&in, &got), 1);
        assert_int_equal(segment_check_rings(&io) + segment_check_rings(&gpu), 0);
        atomic_fetch_xor(&out.producer->head, (uint64_t)1 << bit);
        assert_int_equal(segment_check_rings(&io), -ERROR_DAMAGED);
        assert_non_null(strstr(error_text(), "ring WEIGHTS: own cursor"));
        assert_int_equal(ring_publish(&out, &d), -ERROR_DAMAGED);
        atomic_fetch_xor(&out.producer->head, (uint64_t)1 << bit);
        atomic_fetch_xor(&in.consumer->tail, (uint64_t)1 << bit);
        assert_int_equal(segment_check_rings(&gpu), -ERROR_DAMAGED);
        assert_int_equal(ring_consume(&in, &got), -ERROR_DAMAGED);
    }
    segment_detach(&io);
    segment_detach(&gpu);
    done(fd);
}

/* Who takes a dead one's place finds its cursors, until it begins its own generation. */
static void a_successor_does_not_take_its_predecessors_cursors_for_damage(void **state)
{
    (void)state;
    struct segment first, second;
    struct ring ring;
    struct ring_descriptor d = {.page = 1};
    int fd = created();
    assert_int_equal(segment_attach(&first, dup(fd), ROLE_IO, 0), 0);
    segment_ring(&first, RING_WEIGHTS, 0, &ring);
    assert_int_equal(ring_publish(&ring, &d), 0);
    assert_int_equal(segment_attach(&second, dup(fd), ROLE_IO, 0), 0);
    assert_int_equal(segment_check_rings(&second), 0);
    segment_reset_rings(&second);
    assert_int_equal(segment_check_rings(&second), 0);
    segment_ring(&second, RING_WEIGHTS, 0, &ring);
    assert_int_equal(ring_publish(&ring, &d), 0);
    assert_int_equal(segment_check_rings(&second), 0);
    segment_detach(&first);
    segment_detach(&second);
    done(fd);
}

static void frames_are_a_stride_apart_and_the_same_for_both_ends(void **state)
{
    (void)state;
    struct segment io, gpu;
    int fd = created();
    uint64_t stride = f.at.plan.pools[REGION_WEIGHTS_POOL].stride;
    assert_int_equal(segment_attach(&io, dup(fd), ROLE_IO, 0), 0);
    assert_int_equal(segment_attach(&gpu, dup(fd), ROLE_GPU, 0), 0);
    for (uint32_t i = 0; i < FIXTURE_FRAMES; i++)
        memset(segment_frame(&io, REGION_WEIGHTS_POOL, 0, i), (int)i + 1, 16384);
    const char *base = segment_region(&gpu, REGION_WEIGHTS_POOL, 0);
    for (uint32_t i = 0; i < FIXTURE_FRAMES; i++) {
        const char *frame = segment_frame(&gpu, REGION_WEIGHTS_POOL, 0, i);
        assert_ptr_equal(frame, base + stride * i);
        assert_int_equal(frame[0], i + 1);
        assert_int_equal(frame[16383], i + 1);
    }
    segment_detach(&io);
    segment_detach(&gpu);
    done(fd);
}

/* -- programmer errors -- */

static int dies_of_check(void (*act)(const struct segment *s), int fd)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct segment s;
        struct rlimit none = {0, 0};
        (void)setrlimit(RLIMIT_CORE, &none);
        (void)signal(SIGABRT, SIG_DFL);
        (void)close(STDERR_FILENO);
        if (segment_attach(&s, fd, ROLE_OPT, 1) == 0)
            act(&s);
        _exit(0);
    }
    return fixture_wait(pid) == 1000 + SIGABRT;
}

static void take_others_region(const struct segment *s)
{
    (void)segment_region(s, REGION_STATE_POOL, 0);
}
static void take_hidden_region(const struct segment *s)
{
    (void)segment_region(s, REGION_PAGE_TABLE, 0);
}
static void take_frame_beyond(const struct segment *s)
{
    (void)segment_frame(s, REGION_STATE_POOL, 1, FIXTURE_FRAMES);
}
static void take_others_ring(const struct segment *s)
{
    struct ring ring;
    segment_ring(s, RING_STATE, 2, &ring);
}
static void take_own(const struct segment *s)
{
    struct ring ring;
    segment_ring(s, RING_STATE, 1, &ring);
    (void)segment_frame(s, REGION_STATE_POOL, 1, FIXTURE_FRAMES - 1);
}

static void asking_for_what_is_not_mapped_is_a_programmer_error(void **state)
{
    (void)state;
    int fd = created();
    assert_true(dies_of_check(take_others_region, fd));
    assert_true(dies_of_check(take_hidden_region, fd));
    assert_true(dies_of_check(take_frame_beyond, fd));
    assert_true(dies_of_check(take_others_ring, fd));
    assert_false(dies_of_check(take_own, fd));
    done(fd);
}

/* -- what attach refuses -- */

static void expect_refused(int fd, enum role role, uint32_t index, const char *text)
{
    static unsigned char access[PAGES_MAX];
    struct segment s;
    errno = 0;
    assert_int_equal(segment_attach(&s, fd, role, index), -ERROR_FAILED);
    fixture_expect_text(text);
    assert_null(s.plan);
    if (fd >= 0) {
        assert_int_equal(read_maps(fd, access), 0);
        assert_true(fcntl(fd, F_GETFD) >= 0); /* still the caller's */
    }
}

static void what_is_no_segment_is_refused(void **state)
{
    (void)state;
    int pipes[2], empty = memfd_create("empty", 0);
    expect_refused(-1, ROLE_IO, 0, "cannot read the plan: Bad file descriptor");
    assert_int_equal(pipe(pipes), 0);
    expect_refused(pipes[0], ROLE_IO, 0, "cannot read the plan: Illegal seek");
    expect_refused(empty, ROLE_IO, 0, "found 0");
    assert_int_equal(ftruncate(empty, (off_t)sizeof(struct plan) - 1), 0);
    expect_refused(empty, ROLE_IO, 0, "expected a plan of");
    assert_int_equal(ftruncate(empty, 1 << 20), 0);
    expect_refused(empty, ROLE_IO, 0, "found 0 version 0");
    (void)close(empty);
    (void)close(pipes[0]);
    (void)close(pipes[1]);
}

/* One field of the plan in the segment replaced, and what the refusal must say. */
struct damage {
    size_t offset, bytes;
    uint64_t value;
    const char *text;
};
#define FIELD(field, value, text)                                                                  \
    {                                                                                              \
        offsetof(struct plan, field), sizeof((struct plan *)0)->field, value, text                 \
    }

static void damaged_plans_are_refused(void **state)
{
    (void)state;
    const uint64_t far = (uint64_t)1 << 40;
    const struct damage damages[] = {
        FIELD(magic, PLAN_MAGIC + 1, "expected plan 314e414c50544d version 1"),
        FIELD(layout_version, PLAN_LAYOUT_VERSION + 1, "version 2"),
        FIELD(segment_bytes, 4096, "the plan says 4096 bytes"),
        FIELD(opt_workers, OPT_WORKERS_MAX + 1, "of 65, at most 64 expected"),
        FIELD(opt_workers, WORKERS + 1, "region OPT_CONTROL"),
        FIELD(bytes, sizeof(struct plan) - 1, "a plan of"),
        FIELD(bytes, 0, "a plan of 0 bytes"),
        FIELD(bytes, far, "a plan of 1099511627776 bytes"),
        FIELD(regions[REGION_NORM].instances, OPT_WORKERS_MAX + 9, "region NORM"),
        FIELD(regions[REGION_NORM].offset, 4097, "region NORM"),
        FIELD(regions[REGION_NORM].offset, far, "region NORM"),
        FIELD(regions[REGION_NORM].stride, 100, "region NORM"),
        FIELD(regions[REGION_NORM].stride, far, "region NORM"),
        FIELD(regions[REGION_NORM].stride, UINT64_MAX - 4095, "region NORM"),
        FIELD(regions[REGION_WEIGHTS_POOL].instances, 2, "region WEIGHTS_POOL"),
        FIELD(pools[REGION_OUT_POOL].frames, FIXTURE_FRAMES + 1, "region OUT_POOL"),
        FIELD(pools[REGION_OUT_POOL].stride, far, "region OUT_POOL"),
        FIELD(ring_depth[RING_STATE], FIXTURE_DEPTH - 1, "ring STATE"),
        FIELD(ring_depth[RING_STATE], 1 << 20, "ring STATE"),
        FIELD(ring_producers[RING_STATE].stride, 0, "ring STATE"),
        FIELD(ring_producers[RING_STATE].offset, far, "ring STATE"),
        FIELD(ring_producers[RING_STATE].instances, 1, "ring STATE"),
        FIELD(ring_consumers[RING_STATE].stride, 0, "ring STATE"),
        FIELD(ring_consumers[RING_STATE].offset, 1, "ring STATE"),
    };
    struct segment s;
    int fd = created();
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        const struct damage *d = &damages[i];
        const unsigned char *good = f.at.bytes + d->offset;
        assert_int_equal(pwrite(fd, &d->value, d->bytes, (off_t)d->offset), d->bytes);
        expect_refused(fd, ROLE_IO, 0, d->text);
        assert_int_equal(pwrite(fd, good, d->bytes, (off_t)d->offset), d->bytes);
    }
    assert_int_equal(segment_attach(&s, dup(fd), ROLE_IO, 0), 0); /* all whole again */
    segment_detach(&s);
    done(fd);
}

/* Every field is gone by; one bit anywhere is enough. */
static void a_flipped_bit_anywhere_in_the_plan_is_refused(void **state)
{
    (void)state;
    struct plan_text text;
    struct segment s;
    fixture_fill(&f, WORKERS);
    assert_int_equal(plan_text_add(&f.at.plan, FIXTURE_PLAN_BYTES, "/offload", &text), 0);
    plan_place_regions(&f.at.plan, &f.layout);
    int fd = -1;
    assert_int_equal(segment_create(&f.at.plan, &fd), 0);
    for (uint64_t at = 0; at < f.at.plan.bytes; at += 1 + at % 3) {
        unsigned char byte;
        assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
        assert_int_equal(segment_attach(&s, fd, ROLE_IO, 0), -ERROR_FAILED);
        assert_null(s.plan);
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    }
    assert_int_equal(segment_attach(&s, dup(fd), ROLE_IO, 0), 0);
    segment_detach(&s);
    done(fd);
}

static void a_segment_cut_short_is_refused(void **state)
{
    (void)state;
    int fd = created();
    assert_int_equal(ftruncate(fd, (off_t)f.at.plan.segment_bytes - 4096), 0);
    expect_refused(fd, ROLE_GPU, 0, "the segment has");
    done(fd);
}

static void an_opt_worker_that_is_not_in_the_plan_is_refused(void **state)
{
    (void)state;
    int fd = created();
    expect_refused(fd, ROLE_OPT, WORKERS, "opt_worker 3 of 3");
    done(fd);
}

static void a_region_that_cannot_be_mapped_is_named(void **state)
{
    (void)state;
    char path[64];
    int fd = created();
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int read_only = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(read_only >= 0);
    expect_refused(read_only, ROLE_GPU, 0, "region GPU_CONTROL: shared memory: mmap of");
    (void)close(read_only);
    done(fd);
}

static uint64_t address_space(void)
{
    unsigned long long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (!statm || fscanf(statm, "%llu", &pages) != 1)
        return 0;
    (void)fclose(statm);
    return pages * 4096;
}

/* With 16 MiB of address space left, something of 32 MiB cannot be mapped. */
static void expect_no_room(int fd, const char *text)
{
    pid_t pid = fork();
    if (pid == 0) {
        uint64_t limit = address_space() + (16 << 20);
        struct rlimit r = {limit, limit};
        struct segment s;
        if (setrlimit(RLIMIT_AS, &r) < 0)
            _exit(2);
        int rc = segment_attach(&s, fd, ROLE_IO, 0);
        if (rc != -ERROR_FAILED || s.plan || !strstr(error_text(), text)) {
            (void)fprintf(stderr, "expected \"%s\", found %d \"%s\"\n", text, rc, error_text());
            _exit(1);
        }
        _exit(0);
    }
    assert_int_equal(fixture_wait(pid), 0);
}

static void an_exhausted_address_space_is_reported(void **state)
{
    (void)state;
    int fd = -1;
    if (FIXTURE_SANITIZED)
        skip(); /* their shadow memory needs all of it */
    fixture_fill(&f, 1);
    f.at.plan.ring_depth[RING_STATE] = 1 << 19;
    plan_place_regions(&f.at.plan, &f.layout);
    assert_int_equal(segment_create(&f.at.plan, &fd), 0);
    expect_no_room(fd, "ring STATE: shared memory: mmap of");
    done(fd);

    fd = created();
    uint64_t grown =
        32 << 20; /* a plan region of 32 MiB, laid over the rest: only its size matters */
    uint64_t bytes = f.at.plan.segment_bytes + grown;
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(pwrite(fd, &bytes, 8, offsetof(struct plan, segment_bytes)), 8);
    assert_int_equal(pwrite(fd, &grown, 8, offsetof(struct plan, regions[REGION_PLAN].stride)), 8);
    assert_int_equal(pwrite(fd, &grown, 8, offsetof(struct plan, bytes)), 8);
    expect_no_room(fd, "mmap of the plan");
    done(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(creation_leaves_nothing_in_dev_shm),
        cmocka_unit_test(every_byte_of_a_segment_is_allocated),
        cmocka_unit_test(the_plan_stands_at_its_start_with_the_creators_pid),
        cmocka_unit_test(nobody_can_give_it_a_name),
        cmocka_unit_test(a_segment_larger_than_dev_shm_does_not_fit),
        cmocka_unit_test(signals_do_not_disturb_the_allocation),
        cmocka_unit_test(every_role_maps_exactly_what_the_topology_says),
        cmocka_unit_test(detaching_unmaps_everything),
        cmocka_unit_test(the_two_ends_of_every_ring_meet),
        cmocka_unit_test(a_changed_cursor_is_noticed_by_its_owner),
        cmocka_unit_test(a_successor_does_not_take_its_predecessors_cursors_for_damage),
        cmocka_unit_test(frames_are_a_stride_apart_and_the_same_for_both_ends),
        cmocka_unit_test(asking_for_what_is_not_mapped_is_a_programmer_error),
        cmocka_unit_test(what_is_no_segment_is_refused),
        cmocka_unit_test(damaged_plans_are_refused),
        cmocka_unit_test(a_flipped_bit_anywhere_in_the_plan_is_refused),
        cmocka_unit_test(a_segment_cut_short_is_refused),
        cmocka_unit_test(an_opt_worker_that_is_not_in_the_plan_is_refused),
        cmocka_unit_test(a_region_that_cannot_be_mapped_is_named),
        cmocka_unit_test(an_exhausted_address_space_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
