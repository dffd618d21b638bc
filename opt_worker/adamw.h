/*
 * AdamW over one page: pure functions of plain arrays.
 *
 * Decoupled weight decay (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), as torch's
 * AdamW computes it; t counts updates from 1:
 *
 *     g' = g * scale                          scale = min(1, c / (norm + 1e-6)) of clipping
 *     m' = b1 * m + (1 - b1) * g'
 *     v' = b2 * v + (1 - b2) * g'^2
 *     w' = w - lr * wd * w - lr / (1 - b1^t) * m' / (sqrt(v') / sqrt(1 - b2^t) + eps)
 *
 * In f32 these have many roundings to choose from, so this tree is the definition; fma rounds once,
 * every other node once, sqrt and / are the correctly rounded IEEE ones, never estimates:
 *
 *     g' = g * scale
 *     m' = fma(one_minus_beta1, g', beta1 * m)
 *     v' = fma(one_minus_beta2 * g', g', beta2 * v)
 *     q  = m' / fma(sqrt(v'), inv_sqrt_bias2, eps)
 *     w' = w - fma(step_size, q, d * w)       d = lr_decay where the block decays, else 0
 *
 * Decay and step are added before they meet w, so w is rounded once: a decay of less than half an
 * ulp of w (lr * wd = 1e-8) still counts, where w *= 1 - lr * wd in f32 would lose it.
 *
 * Denormals are zero (isa_mode_enter() in isa.h), whatever the mode of the calling thread. The
 * scalar, AVX2 and AVX-512 implementations give identical bits for all inputs but NaN, whose
 * payload is unspecified (NaN stays NaN). Skipping a step is decided at the norm (norm.h), never
 * here.
 *
 *     struct adamw_page_split page = {.elements = n, .decay_blocks = decay, .gradient = g,
 *                                     .w_hi_in = ..., .m_in = NULL, .v_in = NULL, ...};
 *     adamw_update_split(&scalars, &page);
 */
#ifndef OPT_WORKER_ADAMW_H
#define OPT_WORKER_ADAMW_H

#include <stdint.h>

/* Granularity of decay flags: a tensor starts at a multiple of this in its layer. */
enum { ADAMW_BLOCK_ELEMENTS = 4096 };

/* Computed by the launcher in f64 and rounded once; the same for every page of a step. */
struct adamw_scalars {
    float lr_decay;       /* lr * wd */
    float step_size;      /* lr / (1 - b1^t) */
    float inv_sqrt_bias2; /* 1 / sqrt(1 - b2^t) */
    float beta1;
    float one_minus_beta1; /* 1 - b1 in f64, then rounded: 1 - (float)b1 is off by up to 1e-8 */
    float beta2;
    float one_minus_beta2;
    float eps; /* at least FLT_MIN (CHECK): padding is 0 / eps, and a denormal eps is zero */
    float scale;
};

/*
 * One page, f32 master weights. All arrays are (elements) and none overlaps another: inputs are a
 * committed version and are only read. Bases aligned to 64 bytes may be stored to faster; give them
 * different offsets within 4 KiB (4 KiB aliasing costs a factor of four).
 */
struct adamw_page_f32 {
    uint64_t elements;           /* multiple of 4096 (CHECK) */
    const uint8_t *decay_blocks; /* (elements / 4096): 0 = exempt from decay */
    const float *gradient;       /* f32, sum over the step, not yet scaled */
    const float *w_in;
    const float *m_in; /* NULL: zero moments (codec ZERO) */
    const float *v_in; /* NULL: zero moments */
    float *w_out;
    float *m_out;
    float *v_out;
};

/*
 * One page, split master weights: hi = the bf16 compute weight (the f32 rounded half up), lo = the
 * low 16 bits of the f32; f32 = ((hi - (lo >= 0x8000)) << 16) | lo in 16- and 32-bit unsigned
 * arithmetic, for every pattern (model/split.h). Rules as for adamw_page_f32.
 */
struct adamw_page_split {
    uint64_t elements;
    const uint8_t *decay_blocks;
    const float *gradient;
    const uint16_t *w_hi_in;
    const uint16_t *w_lo_in;
    const float *m_in;
    const float *v_in;
    uint16_t *w_hi_out;
    uint16_t *w_lo_out;
    float *m_out;
    float *v_out;
};

/* One update of one page. The outputs are fully visible to other processes after a release store.
 */
void adamw_update_f32(const struct adamw_scalars *scalars, const struct adamw_page_f32 *page);
void adamw_update_split(const struct adamw_scalars *scalars, const struct adamw_page_split *page);

#endif
