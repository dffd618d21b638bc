#include "opt_worker/adamw.h"

#include "opt_worker/adamw_kernel.h"
#include "opt_worker/isa.h"
#include "procs/check.h"

#include <float.h>
#include <immintrin.h>
#include <stddef.h>

enum { STREAM_ALIGNMENT = 64 };

static adamw_block_f32 *const blocks_f32[] = {
    [ISA_SCALAR] = adamw_block_f32_scalar,
    [ISA_AVX2] = adamw_block_f32_avx2,
    [ISA_AVX512] = adamw_block_f32_avx512,
};
static adamw_block_split *const blocks_split[] = {
    [ISA_SCALAR] = adamw_block_split_scalar,
    [ISA_AVX2] = adamw_block_split_avx2,
    [ISA_AVX512] = adamw_block_split_avx512,
};
_Static_assert(sizeof blocks_f32 / sizeof blocks_f32[0] == ISA_COUNT, "one per instruction set");
_Static_assert(sizeof blocks_split / sizeof blocks_split[0] == ISA_COUNT,
               "one per instruction set");

/* Stands for moments that do not exist yet, so that the first step is the same code and bits. */
static const float zeros[ADAMW_BLOCK_ELEMENTS] __attribute__((aligned(STREAM_ALIGNMENT)));

/* Outputs are read next by a DMA or another process. Measured on one thread (bench_adamw): 1.8
   times as fast as cached stores, which first read every line that they overwrite. */
static enum adamw_store store_preferred = ADAMW_STORE_STREAMED;

void adamw_store_use(enum adamw_store store)
{
    store_preferred = store;
}

static int is_aligned(const void *a, const void *b)
{
    return (((uintptr_t)a | (uintptr_t)b) & (STREAM_ALIGNMENT - 1)) == 0;
}

static struct adamw_scalars scalars_exempt(const struct adamw_scalars *scalars)
{
    struct adamw_scalars exempt = *scalars;
    exempt.lr_decay = 0.0f;
    return exempt;
}

static void page_check(const struct adamw_scalars *scalars, uint64_t elements)
{
    CHECK(elements % ADAMW_BLOCK_ELEMENTS == 0);
    CHECK(scalars->eps >= FLT_MIN);
}

static const float *moments_at(const float *moments, uint64_t at)
{
    return moments ? moments + at : zeros;
}

void adamw_update_f32(const struct adamw_scalars *scalars, const struct adamw_page_f32 *page)
{
    page_check(scalars, page->elements);
    adamw_block_f32 *update = blocks_f32[isa_now()];
    struct adamw_scalars exempt = scalars_exempt(scalars);
    int aligned = is_aligned(page->w_out, page->m_out) && is_aligned(page->v_out, page->v_out);
    enum adamw_store store = aligned ? store_preferred : ADAMW_STORE_CACHED;
    unsigned mode = isa_mode_enter();
    for (uint64_t at = 0; at < page->elements; at += ADAMW_BLOCK_ELEMENTS) {
        struct adamw_page_f32 block = {
            .elements = ADAMW_BLOCK_ELEMENTS,
            .gradient = page->gradient + at,
            .w_in = page->w_in + at,
            .m_in = moments_at(page->m_in, at),
            .v_in = moments_at(page->v_in, at),
            .w_out = page->w_out + at,
            .m_out = page->m_out + at,
            .v_out = page->v_out + at,
        };
        int decays = page->decay_blocks[at / ADAMW_BLOCK_ELEMENTS] != 0;
        update(decays ? scalars : &exempt, &block, store);
    }
    isa_mode_leave(mode);
    _mm_sfence(); /* streamed stores are not ordered by the caller's release store */
}

void adamw_update_split(const struct adamw_scalars *scalars, const struct adamw_page_split *page)
{
    page_check(scalars, page->elements);
    adamw_block_split *update = blocks_split[isa_now()];
    struct adamw_scalars exempt = scalars_exempt(scalars);
    int aligned =
        is_aligned(page->w_hi_out, page->w_lo_out) && is_aligned(page->m_out, page->v_out);
    enum adamw_store store = aligned ? store_preferred : ADAMW_STORE_CACHED;
    unsigned mode = isa_mode_enter();
    for (uint64_t at = 0; at < page->elements; at += ADAMW_BLOCK_ELEMENTS) {
        struct adamw_page_split block = {
            .elements = ADAMW_BLOCK_ELEMENTS,
            .gradient = page->gradient + at,
            .w_hi_in = page->w_hi_in + at,
            .w_lo_in = page->w_lo_in + at,
            .m_in = moments_at(page->m_in, at),
            .v_in = moments_at(page->v_in, at),
            .w_hi_out = page->w_hi_out + at,
            .w_lo_out = page->w_lo_out + at,
            .m_out = page->m_out + at,
            .v_out = page->v_out + at,
        };
        int decays = page->decay_blocks[at / ADAMW_BLOCK_ELEMENTS] != 0;
        update(decays ? scalars : &exempt, &block, store);
    }
    isa_mode_leave(mode);
    _mm_sfence();
}
