/*
 * Attaching to a segment whose plan is damaged (ipc/segment.h).
 *
 *     | flags | role | index | changes ... |
 *
 * A plan whose check no longer holds is refused, whatever was changed. Where the check was made
 * right again (the flag), every byte of every mapping can be touched, and every frame and
 * descriptor lies inside.
 */
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/ring.h"
#include "ipc/segment.h"
#include "tests/fuzz/fuzz.h"
#include "tests/ring/ring_fixture.h"

enum { HEAD_BYTES = 3, WORKERS = 2, SIZE_MAX_BYTES = 64 << 20 };

enum flag {
    FLAG_CHECK = 1, /* the check is computed anew */
    FLAG_SIZE = 2,  /* the segment is as large as the plan says, up to a limit */
};

static struct fixture base;
static int segment_fd = -1;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    const char *const dirs[] = {"/a", "/b"};
    fixture_fill(&base, WORKERS);
    struct plan *plan = &base.at.plan;
    REQUIRE(plan_text_add(plan, FIXTURE_PLAN_BYTES, "/some/where", &plan->output_dir) == 0);
    REQUIRE(plan_texts_add(plan, FIXTURE_PLAN_BYTES, dirs, 2, &plan->offload_dirs) == 0);
    plan_place_regions(plan, &base.layout);
    plan->check = plan_check(plan);
    segment_fd = memfd_create("segment", MFD_CLOEXEC);
    REQUIRE(segment_fd >= 0);
    return 0;
}

static void touch(void *at, uint64_t bytes, int writable)
{
    volatile unsigned char *byte = at;
    for (uint64_t i = 0; i < bytes; i += 4096) {
        unsigned char x = byte[i];
        if (writable)
            byte[i] = x;
    }
    unsigned char last = byte[bytes - 1];
    if (writable)
        byte[bytes - 1] = last;
}

static void touch_rings(const struct segment *s, int r, uint32_t i)
{
    struct ring ring;
    struct ring_descriptor d = {0};
    if (!s->producers[r][i] || !s->consumers[r][i])
        return;
    int from = topology_rings[r].from == s->role, to = topology_rings[r].to == s->role;
    segment_ring(s, (enum ring_id)r, i, &ring);
    touch(ring.producer, ring_producer_bytes(ring.depth), from);
    touch(ring.consumer, sizeof *ring.consumer, to);
    for (uint64_t n = 0; from && n < ring.depth && ring_publish(&ring, &d) == 0; n++)
        ;
}

static void touch_all(const struct segment *s)
{
    for (int r = 0; r < REGION_COUNT; r++)
        for (uint32_t i = 0; i < OPT_WORKERS_MAX; i++) {
            if (!s->regions[r][i])
                continue;
            REQUIRE(i < s->plan->regions[r].instances);
            char access = topology_regions[r].access[s->role][0];
            const struct plan_pool *pool = &s->plan->pools[r];
            touch(s->regions[r][i], s->plan->regions[r].stride, access == 'w');
            REQUIRE(access != '-' && r != REGION_PLAN ? 1 : access == 'r' || access == 'w');
            if (pool->frames > 0 && pool->stride > 0 && pool->frames <= UINT32_MAX)
                touch(segment_frame(s, (enum region_id)r, i, (uint32_t)pool->frames - 1),
                      pool->stride, access == 'w');
        }
    for (int r = 0; r < RING_COUNT; r++)
        for (uint32_t i = 0; i < OPT_WORKERS_MAX; i++)
            touch_rings(s, r, i);
}

static void write_segment(struct fuzz_input *in, uint8_t flags)
{
    static union {
        struct plan plan;
        unsigned char bytes[FIXTURE_PLAN_BYTES];
    } now;
    struct fuzz_op op;
    const uint64_t bytes = base.at.plan.bytes;
    memcpy(now.bytes, base.at.bytes, bytes);
    for (int i = 0; i < FUZZ_OPS_MAX && fuzz_next_op(in, &op); i++)
        fuzz_op_write(&op, now.bytes, bytes, op.at % bytes);
    uint64_t size = base.at.plan.segment_bytes;
    if (flags & FLAG_SIZE && now.plan.segment_bytes <= SIZE_MAX_BYTES)
        size = now.plan.segment_bytes;
    if (flags & FLAG_CHECK && now.plan.bytes >= sizeof now.plan && now.plan.bytes <= sizeof now)
        now.plan.check = plan_check(&now.plan);
    REQUIRE(ftruncate(segment_fd, 0) == 0 && ftruncate(segment_fd, (off_t)size) == 0);
    size_t n = bytes < size ? bytes : size;
    REQUIRE(pwrite(segment_fd, now.bytes, n, 0) == (ssize_t)n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct segment s;
    uint8_t flags = fuzz_u8(&in);
    enum role role = (enum role)(fuzz_u8(&in) % ROLE_COUNT);
    uint8_t which = fuzz_u8(&in);
    uint32_t index = role == ROLE_OPT ? which % (WORKERS + 1) : 0;
    write_segment(&in, flags);
    int fd = dup(segment_fd);
    REQUIRE(fd >= 0);
    error_clear();
    int rc = segment_attach(&s, fd, role, index);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_FAILED);
        REQUIRE(s.plan == NULL && fcntl(fd, F_GETFD) >= 0);
        REQUIRE(close(fd) == 0);
        return 0;
    }
    REQUIRE(role != ROLE_OPT || index < s.plan->opt_workers);
    if (!(flags & FLAG_CHECK)) {
        REQUIRE(s.plan->bytes == base.at.plan.bytes);
        REQUIRE(memcmp(s.plan, &base.at, base.at.plan.bytes) == 0);
    }
    touch_all(&s);
    segment_detach(&s);
    REQUIRE(fcntl(fd, F_GETFD) < 0);
    return 0;
}

#define PLACE(field)                                                                               \
    {                                                                                              \
        0, offsetof(struct plan, field), 8                                                         \
    }
#define SIZES(region)                                                                              \
    PLACE(regions[region].offset), PLACE(regions[region].stride), PLACE(regions[region].instances)

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const struct fuzz_place places[] = {
        PLACE(magic),
        {0, offsetof(struct plan, layout_version), 4},
        PLACE(bytes),
        {0, offsetof(struct plan, opt_workers), 4},
        {0, offsetof(struct plan, generation), 4},
        PLACE(output_dir),
        PLACE(offload_dirs),
        PLACE(segment_bytes),
        PLACE(segment_bytes),
        PLACE(check),
        SIZES(REGION_PLAN),
        SIZES(REGION_LAUNCHER_CONTROL),
        SIZES(REGION_OPT_CONTROL),
        SIZES(REGION_PAGE_TABLE),
        SIZES(REGION_WEIGHTS_POOL),
        SIZES(REGION_OUT_POOL),
        PLACE(pools[REGION_WEIGHTS_POOL].stride),
        PLACE(pools[REGION_WEIGHTS_POOL].frames),
        PLACE(pools[REGION_OUT_POOL].stride),
        PLACE(pools[REGION_OUT_POOL].frames),
        PLACE(ring_depth[RING_WEIGHTS]),
        PLACE(ring_depth[RING_STATE]),
        PLACE(ring_producers[RING_WEIGHTS].offset),
        PLACE(ring_producers[RING_STATE].stride),
        PLACE(ring_producers[RING_STATE].instances),
        PLACE(ring_consumers[RING_STATE].offset),
        PLACE(ring_consumers[RING_WRITEBACK].stride),
    };
    uint64_t random = seed;
    size = fuzz_mutate_ops(data, size, max_size, HEAD_BYTES, &random, places,
                           sizeof places / sizeof places[0]);
    if (size >= 1 && fuzz_below(&random, 4) != 0)
        data[0] |= FLAG_CHECK;
    return size;
}
