/*
 * The reference: the tree of adamw.h, one element at a time. fmaf is the hardware instruction,
 * which keeps FTZ and DAZ; the C library's emulation would not.
 */
#pragma GCC target("fma")

#include "opt_worker/adamw_kernel.h"

#include <math.h>
#include <string.h>

struct element {
    float w, m, v;
};

static inline struct element element_update(const struct adamw_scalars *s, float gradient,
                                            struct element in)
{
    float g = gradient * s->scale;
    float m = fmaf(s->one_minus_beta1, g, s->beta1 * in.m);
    float v = fmaf(s->one_minus_beta2 * g, g, s->beta2 * in.v);
    float q = m / fmaf(sqrtf(v), s->inv_sqrt_bias2, s->eps);
    float w = in.w - fmaf(s->step_size, q, s->lr_decay * in.w);
    return (struct element){w, m, v};
}

static inline float split_join(uint16_t hi, uint16_t lo)
{
    uint32_t bits = (((uint32_t)hi - (uint32_t)(lo >> 15)) << 16) | lo;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* A scalar store is never streamed: it would write a line in sixteen pieces. */
void adamw_block_f32_scalar(const struct adamw_scalars *s, const struct adamw_page_f32 *block,
                            enum adamw_store store)
{
    (void)store;
    for (uint64_t i = 0; i < ADAMW_BLOCK_ELEMENTS; i++) {
        struct element in = {block->w_in[i], block->m_in[i], block->v_in[i]};
        struct element out = element_update(s, block->gradient[i], in);
        block->w_out[i] = out.w;
        block->m_out[i] = out.m;
        block->v_out[i] = out.v;
    }
}

void adamw_block_split_scalar(const struct adamw_scalars *s, const struct adamw_page_split *block,
                              enum adamw_store store)
{
    (void)store;
    for (uint64_t i = 0; i < ADAMW_BLOCK_ELEMENTS; i++) {
        float w = split_join(block->w_hi_in[i], block->w_lo_in[i]);
        struct element in = {w, block->m_in[i], block->v_in[i]};
        struct element out = element_update(s, block->gradient[i], in);
        uint32_t bits = bits_of(out.w);
        block->w_hi_out[i] = (uint16_t)((bits + 0x8000u) >> 16);
        block->w_lo_out[i] = (uint16_t)bits;
        block->m_out[i] = out.m;
        block->v_out[i] = out.v;
    }
}
