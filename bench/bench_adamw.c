/*
 * How fast the optimizer's arithmetic is against what memory allows.
 *
 * Per implementation: AdamW over pages of 4 Mi elements, arrays staggered by an odd multiple of 512
 * bytes, Mparam/s, and the ratio to a copy of the same run: a plain loop of streamed 64-byte stores
 * (STREAM's copy, counted as its read plus its write). f32 AdamW moves 28 bytes per parameter
 * (reads w, m, v, g; writes w, m, v), split the same; the ratio is bytes moved per second over the
 * copy's.
 *
 * The machine is shared, so nothing is compared across runs: each repeat measures copy and update
 * back to back, and the reported ratio is the median over repeats with its quartiles. One JSON line
 * per measurement. Usage: bench_adamw [repeats, default 10]
 */
#include "opt_worker/adamw.h"
#include "opt_worker/adamw_kernel.h"
#include "opt_worker/isa.h"
#include "opt_worker/norm.h"
#include "procs/clock.h"

#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ELEMENTS = 4 << 20,
    ARRAYS = 9, /* w m v gradient in, w m v out; low halves in, out */
    STAGGER = 512 * 3,
    REPEATS_MAX = 1000,
    BYTES_PER_ELEMENT = 28,
};

static float *arrays[ARRAYS];
static uint8_t decay_blocks[ELEMENTS / ADAMW_BLOCK_ELEMENTS];

enum work { WORK_F32, WORK_SPLIT, WORK_NORM, WORK_COUNT };

static const char *const work_names[] = {
    [WORK_F32] = "adamw_f32", [WORK_SPLIT] = "adamw_split", [WORK_NORM] = "norm_page"};
static const double work_bytes[] = {
    [WORK_F32] = BYTES_PER_ELEMENT, [WORK_SPLIT] = BYTES_PER_ELEMENT, [WORK_NORM] = 4};

static const struct adamw_scalars scalars = {
    .lr_decay = 1e-5f,
    .step_size = 1e-3f,
    .inv_sqrt_bias2 = 1.5f,
    .beta1 = 0.9f,
    .one_minus_beta1 = 0.1f,
    .beta2 = 0.95f,
    .one_minus_beta2 = 0.05f,
    .eps = 1e-8f,
    .scale = 0.5f,
};

static int arrays_create(void)
{
    size_t bytes = ELEMENTS * sizeof(float) + STAGGER;
    char *base = aligned_alloc(4096, ARRAYS * bytes / 4096 * 4096 + 4096);
    if (!base)
        return -1;
    for (unsigned a = 0; a < ARRAYS; a++) {
        arrays[a] = (float *)(void *)(base + a * bytes);
        for (size_t i = 0; i < ELEMENTS; i++)
            arrays[a][i] = 1e-3f * (float)(1 + (i * 2654435761u) % 1000);
    }
    memset(decay_blocks, 1, sizeof decay_blocks);
    return 0;
}

static void update_f32(void)
{
    struct adamw_page_f32 page = {
        .elements = ELEMENTS,
        .decay_blocks = decay_blocks,
        .w_in = arrays[0],
        .m_in = arrays[1],
        .v_in = arrays[2],
        .gradient = arrays[3],
        .w_out = arrays[4],
        .m_out = arrays[5],
        .v_out = arrays[6],
    };
    adamw_update_f32(&scalars, &page);
}

static void update_split(void)
{
    struct adamw_page_split page = {
        .elements = ELEMENTS,
        .decay_blocks = decay_blocks,
        .w_hi_in = (const uint16_t *)(void *)arrays[0],
        .w_lo_in = (const uint16_t *)(void *)arrays[7],
        .m_in = arrays[1],
        .v_in = arrays[2],
        .gradient = arrays[3],
        .w_hi_out = (uint16_t *)(void *)arrays[4],
        .w_lo_out = (uint16_t *)(void *)arrays[8],
        .m_out = arrays[5],
        .v_out = arrays[6],
    };
    adamw_update_split(&scalars, &page);
}

static volatile double norm_sink;

static double norm_of(const float *g)
{
    struct norm_tree tree = {.leaves = 0};
    norm_push(&tree, g, ELEMENTS);
    return norm_tree_root(&tree);
}

static double work_seconds(enum work work)
{
    uint64_t start = clock_now_ns();
    if (work == WORK_F32)
        update_f32();
    else if (work == WORK_SPLIT)
        update_split();
    else
        norm_sink = norm_of(arrays[3]);
    return clock_seconds_since(start);
}

/* STREAM's copy over the same memory: three arrays to three others. Returns bytes per second. */
static double copy_bandwidth(void)
{
    uint64_t start = clock_now_ns();
    for (unsigned a = 0; a < 3; a++) {
        const char *from = (const char *)arrays[a];
        char *to = (char *)arrays[4 + a];
        for (size_t i = 0; i < ELEMENTS * sizeof(float); i += 64)
            for (size_t j = 0; j < 64; j += 16)
                _mm_stream_si128((__m128i *)(void *)(to + i + j),
                                 _mm_load_si128((const __m128i *)(const void *)(from + i + j)));
    }
    _mm_sfence();
    return 3.0 * 2.0 * ELEMENTS * sizeof(float) / clock_seconds_since(start);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(enum work work, enum isa isa, enum adamw_store store, unsigned repeats)
{
    static double ratio[REPEATS_MAX], rate[REPEATS_MAX];
    isa_use(isa);
    adamw_store_use(store);
    for (unsigned r = 0; r < repeats; r++) {
        double before = copy_bandwidth(), seconds = work_seconds(work), after = copy_bandwidth();
        rate[r] = ELEMENTS / seconds / 1e6;
        ratio[r] = ELEMENTS * work_bytes[work] / seconds / ((before + after) / 2.0);
    }
    qsort(rate, repeats, sizeof rate[0], compare);
    qsort(ratio, repeats, sizeof ratio[0], compare);
    printf("{\"name\": \"%s\", \"isa\": \"%s\", \"store\": \"%s\", \"mparam_per_s\": %.0f, "
           "\"ratio_to_copy\": %.3f, \"quartiles\": [%.3f, %.3f], \"repeats\": %u}\n",
           work_names[work], isa_name(isa), store == ADAMW_STORE_STREAMED ? "streamed" : "cached",
           rate[repeats / 2], ratio[repeats / 2], ratio[repeats / 4], ratio[repeats * 3 / 4],
           repeats);
    (void)fflush(stdout); /* a lost line shows on the terminal */
}

int main(int argc, char **argv)
{
    long repeats = argc > 1 ? strtol(argv[1], NULL, 10) : 10;
    if (repeats < 1 || repeats > REPEATS_MAX || arrays_create() < 0) {
        (void)fprintf(stderr, "usage: bench_adamw [repeats, 1 to %d]; needs %d MB of memory\n",
                      REPEATS_MAX, ARRAYS * (ELEMENTS >> 18));
        return 2;
    }
    for (enum work work = WORK_F32; work < WORK_COUNT; work++)
        for (enum isa isa = ISA_SCALAR; isa < ISA_COUNT; isa++) {
            if (!isa_supported(isa))
                continue;
            measure(work, isa, ADAMW_STORE_CACHED, (unsigned)repeats);
            if (work != WORK_NORM && isa != ISA_SCALAR)
                measure(work, isa, ADAMW_STORE_STREAMED, (unsigned)repeats);
        }
    return 0;
}
