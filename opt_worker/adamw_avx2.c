/* The tree of adamw.h, eight elements at a time. */
#pragma GCC target("avx2,fma")

#include "opt_worker/adamw_kernel.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

struct lanes {
    __m256 w, m, v;
};

struct constants {
    __m256 lr_decay, step_size, inv_sqrt_bias2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
        scale;
};

INLINE struct constants constants_load(const struct adamw_scalars *s)
{
    return (struct constants){
        .lr_decay = _mm256_set1_ps(s->lr_decay),
        .step_size = _mm256_set1_ps(s->step_size),
        .inv_sqrt_bias2 = _mm256_set1_ps(s->inv_sqrt_bias2),
        .beta1 = _mm256_set1_ps(s->beta1),
        .one_minus_beta1 = _mm256_set1_ps(s->one_minus_beta1),
        .beta2 = _mm256_set1_ps(s->beta2),
        .one_minus_beta2 = _mm256_set1_ps(s->one_minus_beta2),
        .eps = _mm256_set1_ps(s->eps),
        .scale = _mm256_set1_ps(s->scale),
    };
}

INLINE struct lanes lanes_update(const struct constants *c, __m256 gradient, struct lanes in)
{
    __m256 g = _mm256_mul_ps(gradient, c->scale);
    __m256 m = _mm256_fmadd_ps(c->one_minus_beta1, g, _mm256_mul_ps(c->beta1, in.m));
    __m256 v =
        _mm256_fmadd_ps(_mm256_mul_ps(c->one_minus_beta2, g), g, _mm256_mul_ps(c->beta2, in.v));
    __m256 q = _mm256_div_ps(m, _mm256_fmadd_ps(_mm256_sqrt_ps(v), c->inv_sqrt_bias2, c->eps));
    __m256 u = _mm256_fmadd_ps(c->step_size, q, _mm256_mul_ps(c->lr_decay, in.w));
    return (struct lanes){_mm256_sub_ps(in.w, u), m, v};
}

/* Streamed stores write whole cache lines, both halves in a row: half-filled ones cost a fifth. */
INLINE void store_line(void *at, __m256i first, __m256i second, enum adamw_store store)
{
    __m256i_u *line = at;
    if (store == ADAMW_STORE_STREAMED) {
        _mm256_stream_si256((__m256i *)line, first);
        _mm256_stream_si256((__m256i *)line + 1, second);
    } else {
        _mm256_storeu_si256(line, first);
        _mm256_storeu_si256(line + 1, second);
    }
}

INLINE void store_f32(float *at, __m256 first, __m256 second, enum adamw_store store)
{
    store_line(at, _mm256_castps_si256(first), _mm256_castps_si256(second), store);
}

INLINE __m256i load_u16(const uint16_t *at)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)(const void *)at));
}

INLINE __m256 split_join(__m256i hi, __m256i lo)
{
    __m256i top = _mm256_sub_epi32(hi, _mm256_srli_epi32(lo, 15));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(top, 16), lo));
}

INLINE __m256i split_hi(__m256i bits)
{
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
}

INLINE __m256i split_lo(__m256i bits)
{
    return _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
}

/* Two times eight u32, each below 2^16, to sixteen u16 in order (packing works in 128-bit halves).
 */
INLINE __m256i pack_u16(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
}

INLINE struct lanes eight_f32(const struct constants *c, const struct adamw_page_f32 *block,
                              uint64_t i)
{
    struct lanes in = {_mm256_loadu_ps(block->w_in + i), _mm256_loadu_ps(block->m_in + i),
                       _mm256_loadu_ps(block->v_in + i)};
    return lanes_update(c, _mm256_loadu_ps(block->gradient + i), in);
}

INLINE void block_f32(const struct adamw_scalars *s, const struct adamw_page_f32 *block,
                      enum adamw_store store)
{
    struct constants c = constants_load(s);
    for (uint64_t i = 0; i < ADAMW_BLOCK_ELEMENTS; i += 16) {
        struct lanes a = eight_f32(&c, block, i), b = eight_f32(&c, block, i + 8);
        store_f32(block->w_out + i, a.w, b.w, store);
        store_f32(block->m_out + i, a.m, b.m, store);
        store_f32(block->v_out + i, a.v, b.v, store);
    }
}

INLINE struct lanes eight_split(const struct constants *c, const struct adamw_page_split *block,
                                uint64_t i)
{
    struct lanes in = {split_join(load_u16(block->w_hi_in + i), load_u16(block->w_lo_in + i)),
                       _mm256_loadu_ps(block->m_in + i), _mm256_loadu_ps(block->v_in + i)};
    return lanes_update(c, _mm256_loadu_ps(block->gradient + i), in);
}

struct halves {
    __m256i hi, lo;
};

/* Elements i to i + 15; moments are stored, the new weights' halves returned. */
INLINE struct halves sixteen_split(const struct constants *c, const struct adamw_page_split *block,
                                   uint64_t i, enum adamw_store store)
{
    struct lanes a = eight_split(c, block, i), b = eight_split(c, block, i + 8);
    store_f32(block->m_out + i, a.m, b.m, store);
    store_f32(block->v_out + i, a.v, b.v, store);
    __m256i first = _mm256_castps_si256(a.w), second = _mm256_castps_si256(b.w);
    return (struct halves){pack_u16(split_hi(first), split_hi(second)),
                           pack_u16(split_lo(first), split_lo(second))};
}

INLINE void block_split(const struct adamw_scalars *s, const struct adamw_page_split *block,
                        enum adamw_store store)
{
    struct constants c = constants_load(s);
    for (uint64_t i = 0; i < ADAMW_BLOCK_ELEMENTS; i += 32) {
        struct halves a = sixteen_split(&c, block, i, store);
        struct halves b = sixteen_split(&c, block, i + 16, store);
        store_line(block->w_hi_out + i, a.hi, b.hi, store);
        store_line(block->w_lo_out + i, a.lo, b.lo, store);
    }
}

void adamw_block_f32_avx2(const struct adamw_scalars *s, const struct adamw_page_f32 *block,
                          enum adamw_store store)
{
    if (store == ADAMW_STORE_STREAMED)
        block_f32(s, block, ADAMW_STORE_STREAMED);
    else
        block_f32(s, block, ADAMW_STORE_CACHED);
}

void adamw_block_split_avx2(const struct adamw_scalars *s, const struct adamw_page_split *block,
                            enum adamw_store store)
{
    if (store == ADAMW_STORE_STREAMED)
        block_split(s, block, ADAMW_STORE_STREAMED);
    else
        block_split(s, block, ADAMW_STORE_CACHED);
}
