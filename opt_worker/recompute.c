#include "opt_worker/recompute.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/page_image.h"
#include "model/random.h"
#include "opt_worker/adamw_kernel.h"
#include "opt_worker/isa.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/log.h"

enum { DRAWS = 64, STACK_BYTES = 256 * 1024, NO_CORE = -1 };

/* What one computation of a block gives. Residual: split master weights only. */
struct block_out {
    union {
        float f32[ADAMW_BLOCK_ELEMENTS];
        uint16_t hi[ADAMW_BLOCK_ELEMENTS];
    } weights;
    uint16_t residual[ADAMW_BLOCK_ELEMENTS];
    float m[ADAMW_BLOCK_ELEMENTS], v[ADAMW_BLOCK_ELEMENTS];
} __attribute__((aligned(64)));

/* The parts of a block, in OUT or in a block_out. */
struct parts {
    void *at[PART_COUNT];
    uint64_t bytes[PART_COUNT]; /* 0: the dtype has no such part */
};

/* Tests only, by MTLAUNCH_FLIP_OUT=step:part:computations[:path]: a core that fails. In `step`, one
 * bit of `part` (enum page_part) in block 0 of page 0 is changed after the computations that the
 * mask names: 1 the update itself, 2 the second, 4 the third; a different bit in each. With a path:
 * only if that file does not exist and can be created, so once. */
struct flip {
    uint64_t step;
    unsigned part, computations;
    const char *once;
    int acts; /* in the page at hand */
};

struct recompute {
    struct recompute_options options;
    uint32_t *chosen; /* (page_elements / 4096) */
    struct block_out second, third;
    struct flip flip;

    cpu_set_t allowed;        /* of the process */
    int core_of[CPU_SETSIZE]; /* the first hardware thread of each CPU's core */
    int bound;                /* the updating thread is, until the comparison ends */
    int cores[3];             /* of the three computations */

    pthread_t thread;
    int running; /* the thread was started */
    sem_t begin, done;
    /* the thread's while it works, the caller's otherwise; the semaphores order the two */
    const struct recompute_page *page;
    uint64_t n_chosen;
    int leave;
    int status; /* 0; or an enum outcome that is an error */
    uint64_t blocks, differences;
    struct recompute_finding finding; /* of the newest difference */
};

enum outcome { ALIKE = 0, LOST, STUCK };

static const float zeros[ADAMW_BLOCK_ELEMENTS] __attribute__((aligned(64)));

/* -- the choice -- */

uint64_t recompute_choose(const struct recompute_options *o, uint64_t step, uint64_t page,
                          uint64_t n_blocks, uint32_t *chosen)
{
    struct random_key key = {.seed = o->seed, .step = step, .purpose = RANDOM_RECOMPUTE};
    uint64_t first = page * (o->page_elements / ADAMW_BLOCK_ELEMENTS), n = 0;
    uint32_t bits[DRAWS];
    for (uint64_t block = 0; block < n_blocks; block++) {
        if (block % DRAWS == 0)
            random_bits_fill(key, first + block, DRAWS, bits);
        if (((double)bits[block % DRAWS] + 0.5) * 0x1p-32 < o->fraction)
            chosen[n++] = (uint32_t)block;
    }
    return n;
}

/* -- cores -- */

/* The first hardware thread of the core that `cpu` belongs to; `cpu` itself where that is not
 * known. */
static int first_sibling(int cpu)
{
    char path[96], text[32] = "";
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                   cpu);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return cpu;
    ssize_t n = read(fd, text, sizeof text - 1);
    (void)close(fd); /* read only */
    return n > 0 && text[0] >= '0' && text[0] <= '9' ? atoi(text) : cpu;
}

static int same_core(const struct recompute *r, int a, int b)
{
    return a >= 0 && b >= 0 && r->core_of[a] == r->core_of[b];
}

/* A CPU of another core than all of `taken`, or NO_CORE. The next one round, so that the load is
 * spread. */
static int another_core(const struct recompute *r, const int *taken, unsigned n_taken)
{
    int start = taken[0] < 0 ? 0 : taken[0];
    for (int i = 1; i <= CPU_SETSIZE; i++) {
        int cpu = (start + i) % CPU_SETSIZE, free_core = CPU_ISSET((size_t)cpu, &r->allowed) != 0;
        for (unsigned k = 0; free_core && k < n_taken; k++)
            free_core = !same_core(r, cpu, taken[k]);
        if (free_core)
            return cpu;
    }
    return NO_CORE;
}

/* The calling thread goes to `cpu`, or anywhere for NO_CORE. Returns where it is. */
static int go_to(const struct recompute *r, int cpu)
{
    cpu_set_t one = r->allowed;
    if (cpu != NO_CORE) {
        CPU_ZERO(&one);
        CPU_SET((size_t)cpu, &one);
    }
    (void)sched_setaffinity(0, sizeof one, &one); /* a mask that shrank: where it runs is told */
    return sched_getcpu();
}

void recompute_bind(struct recompute *r)
{
    if (!r->running)
        return;
    r->cores[0] = go_to(r, sched_getcpu());
    r->bound = 1;
}

/* -- computing -- */

static const float *at_or_zero(const float *moments, uint64_t at)
{
    return moments ? moments + at : zeros;
}

static struct adamw_scalars scalars_of_block(const struct recompute_page *p, uint64_t block)
{
    struct adamw_scalars s = *p->scalars;
    const uint8_t *decay = p->f32 ? p->f32->decay_blocks : p->split->decay_blocks;
    if (!decay[block])
        s.lr_decay = 0.0f;
    return s;
}

static void compute_f32(const struct recompute_page *p, uint64_t block, enum isa isa,
                        struct block_out *out)
{
    const struct adamw_page_f32 *all = p->f32;
    uint64_t at = block * ADAMW_BLOCK_ELEMENTS;
    struct adamw_scalars s = scalars_of_block(p, block);
    struct adamw_page_f32 one = {.elements = ADAMW_BLOCK_ELEMENTS,
                                 .gradient = all->gradient + at,
                                 .w_in = all->w_in + at,
                                 .m_in = at_or_zero(all->m_in, at),
                                 .v_in = at_or_zero(all->v_in, at),
                                 .w_out = out->weights.f32,
                                 .m_out = out->m,
                                 .v_out = out->v};
    if (isa == ISA_AVX512)
        adamw_block_f32_avx512(&s, &one, ADAMW_STORE_CACHED);
    else if (isa == ISA_AVX2)
        adamw_block_f32_avx2(&s, &one, ADAMW_STORE_CACHED);
    else
        adamw_block_f32_scalar(&s, &one, ADAMW_STORE_CACHED);
}

static void compute_split(const struct recompute_page *p, uint64_t block, enum isa isa,
                          struct block_out *out)
{
    const struct adamw_page_split *all = p->split;
    uint64_t at = block * ADAMW_BLOCK_ELEMENTS;
    struct adamw_scalars s = scalars_of_block(p, block);
    struct adamw_page_split one = {.elements = ADAMW_BLOCK_ELEMENTS,
                                   .gradient = all->gradient + at,
                                   .w_hi_in = all->w_hi_in + at,
                                   .w_lo_in = all->w_lo_in + at,
                                   .m_in = at_or_zero(all->m_in, at),
                                   .v_in = at_or_zero(all->v_in, at),
                                   .w_hi_out = out->weights.hi,
                                   .w_lo_out = out->residual,
                                   .m_out = out->m,
                                   .v_out = out->v};
    if (isa == ISA_AVX512)
        adamw_block_split_avx512(&s, &one, ADAMW_STORE_CACHED);
    else if (isa == ISA_AVX2)
        adamw_block_split_avx2(&s, &one, ADAMW_STORE_CACHED);
    else
        adamw_block_split_scalar(&s, &one, ADAMW_STORE_CACHED);
}

static void compute(const struct recompute_page *p, uint64_t block, enum isa isa,
                    struct block_out *out)
{
    unsigned mode = isa_mode_enter();
    if (p->f32)
        compute_f32(p, block, isa, out);
    else
        compute_split(p, block, isa, out);
    isa_mode_leave(mode);
}

/* -- comparing -- */

static struct parts parts_of_update(const struct recompute_page *p, uint64_t block)
{
    uint64_t at = block * ADAMW_BLOCK_ELEMENTS, n = ADAMW_BLOCK_ELEMENTS;
    if (p->f32)
        return (struct parts){
            .at = {p->f32->w_out + at, NULL, p->f32->m_out + at, p->f32->v_out + at},
            .bytes = {n * sizeof(float), 0, n * sizeof(float), n * sizeof(float)}};
    return (struct parts){.at = {p->split->w_hi_out + at, p->split->w_lo_out + at,
                                 p->split->m_out + at, p->split->v_out + at},
                          .bytes = {n * sizeof(uint16_t), n * sizeof(uint16_t), n * sizeof(float),
                                    n * sizeof(float)}};
}

static struct parts parts_of_block(const struct recompute_page *p, struct block_out *out)
{
    struct parts parts = parts_of_update(p, 0);
    parts.at[PART_WEIGHTS] = &out->weights;
    parts.at[PART_RESIDUAL] = out->residual;
    parts.at[PART_M] = out->m;
    parts.at[PART_V] = out->v;
    return parts;
}

/* The first part that differs, or PART_COUNT. */
static unsigned first_difference(const struct parts *a, const struct parts *b)
{
    unsigned part = 0;
    while (part < PART_COUNT &&
           (a->bytes[part] == 0 || memcmp(a->at[part], b->at[part], a->bytes[part]) == 0))
        part++;
    return part;
}

static int parts_alike(const struct parts *a, const struct parts *b)
{
    return first_difference(a, b) == PART_COUNT;
}

/* Within the block. */
static uint64_t first_element(const struct parts *a, const struct parts *b, unsigned part)
{
    const unsigned char *x = a->at[part], *y = b->at[part];
    uint64_t byte = 0;
    while (x[byte] == y[byte])
        byte++;
    return byte / (a->bytes[part] / ADAMW_BLOCK_ELEMENTS);
}

static void put(const struct parts *to, const struct parts *from)
{
    for (unsigned part = 0; part < PART_COUNT; part++)
        if (to->bytes[part])
            memcpy(to->at[part], from->at[part], to->bytes[part]);
}

/* -- the core that fails, in tests -- */

static int arm_flip(struct flip *f)
{
    char *end = NULL;
    const char *text = getenv("MTLAUNCH_FLIP_OUT");
    if (!text)
        return 0;
    f->step = strtoull(text, &end, 10);
    f->part = *end == ':' ? (unsigned)strtoul(end + 1, &end, 10) : PART_COUNT;
    f->computations = *end == ':' ? (unsigned)strtoul(end + 1, &end, 10) : 0;
    f->once = *end == ':' ? end + 1 : NULL;
    if (f->step == 0 || f->part >= PART_COUNT || f->computations == 0)
        return error_set(ERROR_USER, "MTLAUNCH_FLIP_OUT=%s: expected step:part:computations[:path]",
                         text);
    return 0;
}

static int flip_acts(const struct flip *f, const struct recompute_page *p)
{
    if (f->computations == 0 || p->step != f->step || p->page != 0)
        return 0;
    if (!f->once)
        return 1;
    int fd = open(f->once, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0)
        return 0;
    (void)close(fd); /* empty */
    return 1;
}

static void flip(const struct flip *f, unsigned computation, uint64_t block,
                 const struct parts *parts)
{
    enum { BYTE = 20 };
    if (f->acts && block == 0 && (f->computations >> computation & 1) && parts->bytes[f->part])
        ((unsigned char *)parts->at[f->part])[BYTE] ^= (unsigned char)(1u << computation);
}

/* -- the thread -- */

/* No agreement of the first two: which of them is right? */
static enum outcome decide(struct recompute *r, uint64_t block, const struct parts *first,
                           const struct parts *second)
{
    const struct recompute_page *p = r->page;
    struct parts third = parts_of_block(p, &r->third);
    struct recompute_finding *found = &r->finding;
    unsigned part = first_difference(first, second);
    int core = another_core(r, r->cores, 2);
    r->differences++;
    r->cores[2] = go_to(r, core != NO_CORE ? core : r->cores[0]);
    compute(p, block, ISA_SCALAR, &r->third);
    flip(&r->flip, 2, block, &third);
    *found = (struct recompute_finding){.step = p->step,
                                        .page = p->page,
                                        .block = block,
                                        .element = block * ADAMW_BLOCK_ELEMENTS +
                                                   first_element(first, second, part),
                                        .part = part,
                                        .cores = {r->cores[0], r->cores[1], r->cores[2]}};
    (void)go_to(r, r->cores[1]);
    if (parts_alike(&third, first)) {
        found->wrong = 1;
        return ALIKE;
    }
    if (!parts_alike(&third, second))
        return LOST;
    put(first, second);
    return parts_alike(first, second) ? ALIKE : STUCK;
}

static void tell(const struct recompute *r)
{
    struct worker_control *c = r->options.control;
    if (!c)
        return;
    uint64_t n = atomic_load_explicit(&c->n_findings, memory_order_relaxed);
    c->findings[n % CONTROL_FINDINGS] = r->finding;
    atomic_store_explicit(&c->n_findings, n + 1, memory_order_release);
}

static enum outcome compare_block(struct recompute *r, uint64_t block)
{
    struct parts first = parts_of_update(r->page, block);
    struct parts second = parts_of_block(r->page, &r->second);
    compute(r->page, block, isa_now(), &r->second);
    flip(&r->flip, 1, block, &second);
    r->blocks++;
    if (parts_alike(&first, &second))
        return ALIKE;
    enum outcome outcome = decide(r, block, &first, &second);
    if (outcome == ALIKE)
        tell(r);
    return outcome;
}

static void take(sem_t *semaphore)
{
    while (sem_wait(semaphore) < 0)
        CHECK(errno == EINTR);
}

static void *run_thread(void *argument)
{
    struct recompute *r = argument;
    for (;;) {
        take(&r->begin);
        if (r->leave)
            return NULL;
        if (r->cores[1] < 0 || same_core(r, r->cores[1], r->cores[0]))
            r->cores[1] = go_to(r, another_core(r, r->cores, 1));
        r->status = ALIKE;
        for (uint64_t i = 0; i < r->n_chosen && r->status == ALIKE; i++)
            r->status = (int)compare_block(r, r->chosen[i]);
        CHECK(sem_post(&r->done) == 0);
    }
}

static int start_thread(struct recompute *r)
{
    pthread_attr_t attributes;
    r->cores[1] = NO_CORE;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        r->core_of[cpu] = first_sibling(cpu);
    if (sched_getaffinity(0, sizeof r->allowed, &r->allowed) < 0 || sem_init(&r->begin, 0, 0) < 0 ||
        sem_init(&r->done, 0, 0) < 0)
        return error_set(ERROR_FAILED, "optimizer.recompute: %s", strerror(errno));
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0);
    int rc = pthread_create(&r->thread, &attributes, run_thread, r);
    (void)pthread_attr_destroy(&attributes); /* always 0 */
    if (rc != 0)
        return error_set(ERROR_FAILED, "optimizer.recompute: no thread: %s", strerror(rc));
    r->running = 1;
    int here = sched_getcpu();
    if (another_core(r, &here, 1) == NO_CORE)
        log_line(LOG_WARN, "optimizer.recompute: only one core may be used; blocks are computed "
                           "twice on the same one");
    return 0;
}

/* -- the caller -- */

int recompute_open(struct recompute **out, const struct recompute_options *options)
{
    struct recompute *r = aligned_alloc(64, sizeof *r);
    *out = r;
    if (!r)
        return error_set(ERROR_FAILED, "out of memory");
    memset(r, 0, sizeof *r);
    r->options = *options;
    r->chosen = calloc(options->page_elements / ADAMW_BLOCK_ELEMENTS, sizeof *r->chosen);
    if (!r->chosen)
        return error_set(ERROR_FAILED, "out of memory");
    if (arm_flip(&r->flip) < 0)
        return -(int)error_kind_now();
    return options->fraction > 0.0 ? start_thread(r) : 0;
}

void recompute_close(struct recompute *r)
{
    if (!r)
        return;
    if (r->running) {
        r->leave = 1;
        CHECK(sem_post(&r->begin) == 0);
        CHECK(pthread_join(r->thread, NULL) == 0);
        (void)sem_destroy(&r->begin); /* nobody waits any more */
        (void)sem_destroy(&r->done);
        log_line(LOG_INFO, "recomputed %llu blocks, %llu differed", (unsigned long long)r->blocks,
                 (unsigned long long)r->differences);
    }
    free(r->chosen);
    free(r);
}

uint64_t recompute_blocks(const struct recompute *r)
{
    return r->blocks;
}

uint64_t recompute_differences(const struct recompute *r)
{
    return r->differences;
}

static int fail(const struct recompute *r)
{
    const struct recompute_finding *f = &r->finding;
    char where[160];
    (void)snprintf(where, sizeof where, "step %llu, page %llu, block %llu, %s of element %llu",
                   (unsigned long long)f->step, (unsigned long long)f->page,
                   (unsigned long long)f->block, page_part_name((enum page_part)f->part),
                   (unsigned long long)f->element);
    if (r->status == STUCK)
        (void)error_set(ERROR_FAILED, "%s: memory does not keep what is written to it", where);
    else
        (void)error_set(ERROR_FAILED,
                        "%s: computed three times, on cores %d, %d and %d, with three results: "
                        "this machine does not compute reliably",
                        where, f->cores[0], f->cores[1], f->cores[2]);
    return error_hint("test memory and processor");
}

int recompute_compare(struct recompute *r, const struct recompute_page *page)
{
    uint64_t elements = page->f32 ? page->f32->elements : page->split->elements;
    struct parts first = parts_of_update(page, 0);
    r->flip.acts = flip_acts(&r->flip, page);
    flip(&r->flip, 0, 0, &first);
    if (!r->running)
        return 0;
    r->n_chosen = recompute_choose(&r->options, page->step, page->page,
                                   elements / ADAMW_BLOCK_ELEMENTS, r->chosen);
    r->page = page;
    r->status = ALIKE;
    if (!r->bound)
        r->cores[0] = sched_getcpu();
    if (r->n_chosen) {
        CHECK(sem_post(&r->begin) == 0);
        take(&r->done);
    }
    if (r->bound)
        (void)go_to(r, NO_CORE);
    r->bound = 0;
    return r->status == ALIKE ? 0 : fail(r);
}
