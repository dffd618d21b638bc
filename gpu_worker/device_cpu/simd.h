/*
 * Eight f32 lanes, and the functions of one variable that the device needs, written once so that
 * their bits depend neither on the compiler nor on the C library.
 *
 * Include after `#pragma GCC target("avx2,fma")` (x86-64-v3 is the least CPU this device accepts).
 * Multiply-add is fused only where fma is written. Reductions keep a fixed number of lanes and are
 * summed in the fixed order of v8_sum().
 */
#ifndef GPU_WORKER_DEVICE_CPU_SIMD_H
#define GPU_WORKER_DEVICE_CPU_SIMD_H

#include <immintrin.h>
#include <stdint.h>

#include "gpu_worker/device.h"

typedef __m256 v8;
enum { LANES = 8 };

#define SIMD static inline __attribute__((always_inline))

SIMD __m256i v8_mask(uint64_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first min(count, 8) of p; the other lanes are zero and their memory is not touched. */
SIMD v8 v8_load(const float *p, uint64_t count)
{
    return count >= LANES ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, v8_mask(count));
}

SIMD void v8_store(float *p, uint64_t count, v8 x)
{
    if (count >= LANES)
        _mm256_storeu_ps(p, x);
    else
        _mm256_maskstore_ps(p, v8_mask(count), x);
}

SIMD v8 v8_set(float x)
{
    return _mm256_set1_ps(x);
}

SIMD v8 v8_fma(v8 a, v8 b, v8 c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* ((0+4)+(2+6)) + ((1+5)+(3+7)) */
SIMD float v8_sum(v8 x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

SIMD float v8_largest(v8 x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* Nearest bfloat16, ties to even; a NaN stays a NaN. */
SIMD v8 v8_bf16(v8 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256i chosen = _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(is_nan));
    return _mm256_castsi256_ps(_mm256_and_si256(chosen, _mm256_set1_epi32((int)0xffff0000)));
}

/* What an operation does to each value that it stores. */
enum rounding { ROUND_NONE, ROUND_BF16 };

SIMD enum rounding rounding_of(const struct device *device)
{
    return device->dtype == DEVICE_BF16 ? ROUND_BF16 : ROUND_NONE;
}

SIMD v8 v8_round(v8 x, enum rounding rounding)
{
    return rounding == ROUND_BF16 ? v8_bf16(x) : x;
}

/*
 * e^x = 2^n (1 + p) for x in [-87.33, 88.37], or NaN: x = n ln 2 + r, |r| <= ln 2 / 2, p = e^r - 1
 * as Taylor series in r to degree 7.
 */
struct v8_exponential {
    v8 p, scale; /* scale = 2^n */
};

SIMD struct v8_exponential v8_exponential(v8 x)
{
    v8 n = _mm256_round_ps(_mm256_mul_ps(x, v8_set(0x1.715476p+0f)),
                           _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    v8 r = v8_fma(n, v8_set(-0x1.62e4p-1f), x); /* 15 bits of ln 2: the product is exact */
    r = v8_fma(n, v8_set(-0x1.7f7d1cp-20f), r);
    v8 p = v8_set(1.0f / 5040.0f);
    p = v8_fma(p, r, v8_set(1.0f / 720.0f));
    p = v8_fma(p, r, v8_set(1.0f / 120.0f));
    p = v8_fma(p, r, v8_set(1.0f / 24.0f));
    p = v8_fma(p, r, v8_set(1.0f / 6.0f));
    p = v8_fma(p, r, v8_set(0.5f));
    p = v8_fma(_mm256_mul_ps(r, r), p, r);
    __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return (struct v8_exponential){p, _mm256_castsi256_ps(exponent)};
}

/* e^x to about 1 ulp. Below -87.33 (denormal results) the result is 0; above 88.37 it stays at
 * e^88.37. NaN stays NaN. */
SIMD v8 v8_exp(v8 x)
{
    const v8 lowest = v8_set(-87.33f);
    /* min and max return their second operand when one is NaN */
    v8 t = _mm256_min_ps(v8_set(88.37f), _mm256_max_ps(lowest, x));
    struct v8_exponential e = v8_exponential(t);
    v8 result = v8_fma(e.p, e.scale, e.scale);
    return _mm256_andnot_ps(_mm256_cmp_ps(x, lowest, _CMP_LT_OQ), result);
}

/* 1 / (1 + e^-x) */
SIMD v8 v8_sigmoid(v8 x)
{
    v8 e = v8_exp(_mm256_xor_ps(x, v8_set(-0.0f)));
    return _mm256_div_ps(v8_set(1.0f), _mm256_add_ps(v8_set(1.0f), e));
}

/* tanh |x| = e / (e + 2) with e = e^(2 |x|) - 1, which 2^n p + (2^n - 1) gives without cancellation
 * however small x is. */
SIMD v8 v8_tanh(v8 x)
{
    v8 sign = _mm256_and_ps(x, v8_set(-0.0f)), size = _mm256_andnot_ps(v8_set(-0.0f), x);
    struct v8_exponential power =
        v8_exponential(_mm256_min_ps(v8_set(44.0f), _mm256_add_ps(size, size)));
    v8 e = v8_fma(power.p, power.scale, _mm256_sub_ps(power.scale, v8_set(1.0f)));
    return _mm256_or_ps(sign, _mm256_div_ps(e, _mm256_add_ps(e, v8_set(2.0f))));
}

/* The normal distribution: Phi(x), and its density phi(x). */
struct v8_normal {
    v8 below, density;
};

/*
 * With z = |x|, Phi(-z) = e^(-z^2/2) t P(t), t = 1 / (1 + 0.35 z): P of degree 10, fitted to
 * relative error 3e-9 for z <= 13.4, where the exponential ends. z^2 is taken with its rounding
 * error.
 */
SIMD struct v8_normal v8_normal(v8 x)
{
    static const float c[] = {0.13962649f, 0.13970838f,  0.121751115f, 0.09231149f,
                              0.03263613f, 0.007099091f, 0.01721386f,  -0.17592888f,
                              0.20634767f, -0.09874152f, 0.017976169f};
    v8 z = _mm256_andnot_ps(v8_set(-0.0f), x);
    v8 capped = _mm256_min_ps(v8_set(1e18f), z); /* its square is finite */
    v8 square = _mm256_mul_ps(capped, capped);
    v8 error = v8_fma(capped, capped, _mm256_xor_ps(square, v8_set(-0.0f)));
    v8 e = v8_exp(_mm256_mul_ps(square, v8_set(-0.5f)));
    e = v8_fma(_mm256_mul_ps(error, v8_set(-0.5f)), e, e);
    v8 t = _mm256_div_ps(v8_set(1.0f), v8_fma(capped, v8_set(0.35f), v8_set(1.0f)));
    v8 p = v8_set(c[10]);
    for (int i = 9; i >= 0; i--)
        p = v8_fma(p, t, v8_set(c[i]));
    v8 tail = _mm256_mul_ps(e, _mm256_mul_ps(p, t));
    v8 rest = _mm256_sub_ps(v8_set(1.0f), tail);
    return (struct v8_normal){_mm256_blendv_ps(rest, tail, x),
                              _mm256_mul_ps(e, v8_set(0.3989422804f))};
}

#undef SIMD
#endif
