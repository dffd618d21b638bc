/* The tree of adamw.h, sixteen elements at a time: one cache line of each array. AVX-512F only. */
#pragma GCC target("avx512f,avx2,fma")

#include "opt_worker/adamw_kernel.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

struct lanes {
    __m512 w, m, v;
};

struct constants {
    __m512 lr_decay, step_size, inv_sqrt_bias2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
        scale;
};

INLINE struct constants constants_load(const struct adamw_scalars *s)
{
    return (struct constants){
        .lr_decay = _mm512_set1_ps(s->lr_decay),
        .step_size = _mm512_set1_ps(s->step_size),
        .inv_sqrt_bias2 = _mm512_set1_ps(s->inv_sqrt_bias2),
        .beta1 = _mm512_set1_ps(s->beta1),
        .one_minus_beta1 = _mm512_set1_ps(s->one_minus_beta1),
        .beta2 = _mm512_set1_ps(s->beta2),
        .one_minus_beta2 = _mm512_set1_ps(s->one_minus_beta2),
        .eps = _mm512_set1_ps(s->eps),
        .scale = _mm512_set1_ps(s->scale),
    };
}

INLINE struct lanes lanes_update(const struct constants *c, __m512 gradient, struct lanes in)
{
    __m512 g = _mm512_mul_ps(gradient, c->scale);
    __m512 m = _mm512_fmadd_ps(c->one_minus_beta1, g, _mm512_mul_ps(c->beta1, in.m));
    __m512 v =
        _mm512_fmadd_ps(_mm512_mul_ps(c->one_minus_beta2, g), g, _mm512_mul_ps(c->beta2, in.v));
    __m512 q = _mm512_div_ps(m, _mm512_fmadd_ps(_mm512_sqrt_ps(v), c->inv_sqrt_bias2, c->eps));
    __m512 u = _mm512_fmadd_ps(c->step_size, q, _mm512_mul_ps(c->lr_decay, in.w));
    return (struct lanes){_mm512_sub_ps(in.w, u), m, v};
}

INLINE void store_f32(float *at, __m512 value, enum adamw_store store)
{
    if (store == ADAMW_STORE_STREAMED)
        _mm512_stream_ps(at, value);
    else
        _mm512_storeu_ps(at, value);
}

/* The low halves of twice sixteen u32: one whole line, as half-filled streamed ones cost a fifth.
 */
INLINE void store_u16(uint16_t *at, __m512i first, __m512i second, enum adamw_store store)
{
    __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(first));
    __m512i line = _mm512_inserti64x4(low, _mm512_cvtepi32_epi16(second), 1);
    if (store == ADAMW_STORE_STREAMED)
        _mm512_stream_si512((__m512i *)(void *)at, line);
    else
        _mm512_storeu_si512(at, line);
}

INLINE __m512i load_u16(const uint16_t *at)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)(const void *)at));
}

INLINE __m512 split_join(__m512i hi, __m512i lo)
{
    __m512i top = _mm512_sub_epi32(hi, _mm512_srli_epi32(lo, 15));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(top, 16), lo));
}

INLINE __m512i split_hi(__m512i bits)
{
    return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
}

INLINE void block_f32(const struct adamw_scalars *s, const struct adamw_page_f32 *block,
                      enum adamw_store store)
{
    struct constants c = constants_load(s);
    for (uint64_t i = 0; i < ADAMW_BLOCK_ELEMENTS; i += 16) {
        struct lanes in = {_mm512_loadu_ps(block->w_in + i), _mm512_loadu_ps(block->m_in + i),
                           _mm512_loadu_ps(block->v_in + i)};
        struct lanes out = lanes_update(&c, _mm512_loadu_ps(block->gradient + i), in);
        store_f32(block->w_out + i, out.w, store);
        store_f32(block->m_out + i, out.m, store);
        store_f32(block->v_out + i, out.v, store);
    }
}

/* Elements i to i + 15; moments are stored, the new weights' bits returned. */
INLINE __m512i sixteen_split(const struct constants *c, const struct adamw_page_split *block,
                             uint64_t i, enum adamw_store store)
{
    struct lanes in = {split_join(load_u16(block->w_hi_in + i), load_u16(block->w_lo_in + i)),
                       _mm512_loadu_ps(block->m_in + i), _mm512_loadu_ps(block->v_in + i)};
    struct lanes out = lanes_update(c, _mm512_loadu_ps(block->gradient + i), in);
    store_f32(block->m_out + i, out.m, store);
    store_f32(block->v_out + i, out.v, store);
    return _mm512_castps_si512(out.w);
}

INLINE void block_split(const struct adamw_scalars *s, const struct adamw_page_split *block,
                        enum adamw_store store)
{
    struct constants c = constants_load(s);
    for (uint64_t i = 0; i < ADAMW_BLOCK_ELEMENTS; i += 32) {
        __m512i first = sixteen_split(&c, block, i, store);
        __m512i second = sixteen_split(&c, block, i + 16, store);
        store_u16(block->w_hi_out + i, split_hi(first), split_hi(second), store);
        store_u16(block->w_lo_out + i, first, second, store);
    }
}

void adamw_block_f32_avx512(const struct adamw_scalars *s, const struct adamw_page_f32 *block,
                            enum adamw_store store)
{
    if (store == ADAMW_STORE_STREAMED)
        block_f32(s, block, ADAMW_STORE_STREAMED);
    else
        block_f32(s, block, ADAMW_STORE_CACHED);
}

void adamw_block_split_avx512(const struct adamw_scalars *s, const struct adamw_page_split *block,
                              enum adamw_store store)
{
    if (store == ADAMW_STORE_STREAMED)
        block_split(s, block, ADAMW_STORE_STREAMED);
    else
        block_split(s, block, ADAMW_STORE_CACHED);
}
