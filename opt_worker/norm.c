#include "opt_worker/norm.h"

#include "opt_worker/isa.h"
#include "procs/check.h"

#include <immintrin.h>

typedef double norm_block(const float *g);

/* Lanes l and l + half, down to one: the tree at the end of a block. */
static double block_scalar(const float *g)
{
    double lane[NORM_LANES] = {0};
    for (unsigned i = 0; i < NORM_BLOCK_ELEMENTS; i += NORM_LANES)
        for (unsigned l = 0; l < NORM_LANES; l++)
            lane[l] += (double)g[i + l] * (double)g[i + l];
    for (unsigned half = NORM_LANES / 2; half > 0; half /= 2)
        for (unsigned l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

/* a: lanes l to l + 3 of a tree with four lanes left. */
__attribute__((target("avx2,fma"))) static inline double four_lanes_sum(__m256d a)
{
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

/* A square of an f32 is exact in f64, so a fused multiply-add gives the bits of the plain sum. */
__attribute__((target("avx2,fma"))) static double block_avx2(const float *g)
{
    __m256d lane[NORM_LANES / 4];
    for (unsigned l = 0; l < NORM_LANES / 4; l++)
        lane[l] = _mm256_setzero_pd();
    for (unsigned i = 0; i < NORM_BLOCK_ELEMENTS; i += NORM_LANES) {
#pragma GCC unroll 8
        for (unsigned l = 0; l < NORM_LANES / 4; l++) {
            __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(g + i + l * 4));
            lane[l] = _mm256_fmadd_pd(x, x, lane[l]);
        }
    }
    for (unsigned half = NORM_LANES / 8; half > 0; half /= 2)
        for (unsigned l = 0; l < half; l++)
            lane[l] = _mm256_add_pd(lane[l], lane[l + half]);
    return four_lanes_sum(lane[0]);
}

__attribute__((target("avx512f,avx2,fma"))) static double block_avx512(const float *g)
{
    __m512d lane[NORM_LANES / 8];
    for (unsigned l = 0; l < NORM_LANES / 8; l++)
        lane[l] = _mm512_setzero_pd();
    for (unsigned i = 0; i < NORM_BLOCK_ELEMENTS; i += NORM_LANES) {
#pragma GCC unroll 4
        for (unsigned l = 0; l < NORM_LANES / 8; l++) {
            __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(g + i + l * 8));
            lane[l] = _mm512_fmadd_pd(x, x, lane[l]);
        }
    }
    __m512d eight = _mm512_add_pd(_mm512_add_pd(lane[0], lane[2]), _mm512_add_pd(lane[1], lane[3]));
    return four_lanes_sum(
        _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1)));
}
_Static_assert(NORM_LANES == 32, "the AVX-512 block combines four registers by hand");

static norm_block *const blocks[] = {
    [ISA_SCALAR] = block_scalar,
    [ISA_AVX2] = block_avx2,
    [ISA_AVX512] = block_avx512,
};
_Static_assert(sizeof blocks / sizeof blocks[0] == ISA_COUNT, "one per instruction set");

void norm_push(struct norm_tree *tree, const float *g, uint64_t elements)
{
    CHECK(elements % NORM_BLOCK_ELEMENTS == 0);
    norm_block *block_sum = blocks[isa_now()];
    unsigned mode = isa_mode_enter();
    for (uint64_t at = 0; at < elements; at += NORM_BLOCK_ELEMENTS)
        norm_tree_push(tree, block_sum(g + at));
    isa_mode_leave(mode);
}
