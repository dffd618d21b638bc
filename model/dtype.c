#include "model/dtype.h"

#include <string.h>

#include "procs/check.h"

static const struct {
    const char *name;
    uint64_t bytes;
} dtypes[DTYPE_COUNT] = {
#define DTYPE_ROW(id, name, bytes) [id] = {name, bytes},
    MODEL_DTYPES(DTYPE_ROW)
#undef DTYPE_ROW
};

static const struct {
    const char *name;
    enum model_dtype dtype;
} torch_names[] = {
    {"float32", DTYPE_F32},
    {"bfloat16", DTYPE_BF16},
    {"float16", DTYPE_F16},
};

enum { TORCH_NAMES = sizeof torch_names / sizeof torch_names[0] };

uint64_t model_dtype_bytes(enum model_dtype dtype)
{
    CHECK(dtype < DTYPE_COUNT);
    return dtypes[dtype].bytes;
}

const char *model_dtype_name(enum model_dtype dtype)
{
    CHECK(dtype < DTYPE_COUNT);
    return dtypes[dtype].name;
}

int model_dtype_from_name(const char *name, enum model_dtype *dtype)
{
    for (unsigned i = 0; i < DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) == 0) {
            *dtype = (enum model_dtype)i;
            return 0;
        }
    }
    return -1;
}

const char *model_dtype_torch_name(enum model_dtype dtype)
{
    for (unsigned i = 0; i < TORCH_NAMES; i++)
        if (torch_names[i].dtype == dtype)
            return torch_names[i].name;
    return NULL;
}

int model_dtype_from_torch_name(const char *name, enum model_dtype *dtype)
{
    for (unsigned i = 0; i < TORCH_NAMES; i++) {
        if (strcmp(name, torch_names[i].name) == 0) {
            *dtype = torch_names[i].dtype;
            return 0;
        }
    }
    return -1;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void dtype_bf16_to_f32(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = float_of((uint32_t)in[i] << 16);
}

/* A subnormal half is k * 2^-24, k < 1024: shift k up until its leading one is the implicit bit. */
static uint32_t f16_subnormal_to_f32(uint32_t fraction)
{
    uint32_t shift = (uint32_t)__builtin_clz(fraction) - 21; /* brings bit 10 to where it belongs */
    return ((113 - shift) << 23) | (((fraction << shift) & 0x3ffu) << 13);
}

static uint32_t f16_bits_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 31u;
    uint32_t fraction = half & 0x3ffu;
    if (exponent == 31)
        return sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0);
    if (exponent != 0)
        return sign | ((exponent + 112) << 23) | (fraction << 13);
    return sign | (fraction ? f16_subnormal_to_f32(fraction) : 0);
}

void dtype_f16_to_f32(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = float_of(f16_bits_to_f32(in[i]));
}

void dtype_f32_to_bf16(const float *in, uint64_t n, uint16_t *out)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(in[i]);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u; /* rounding could carry it away */
        out[i] = (uint16_t)(nan ? ((bits >> 16) | 0x40u) : rounded);
    }
}

/* value >> shift, ties to even; 1 <= shift <= 31 */
static uint32_t shift_right_rounded(uint32_t value, uint32_t shift)
{
    uint32_t kept = value >> shift;
    uint32_t rest = value & ((1u << shift) - 1);
    uint32_t half = 1u << (shift - 1);
    return kept + (rest > half || (rest == half && (kept & 1)));
}

static uint16_t f32_bits_to_f16(uint32_t bits)
{
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t exponent = magnitude >> 23;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (exponent >= 143) /* 2^16 and above */
        return (uint16_t)(sign | 0x7c00u);
    if (exponent >= 113) /* normal; a carry into the exponent, even to infinity, is right */
        return (uint16_t)(sign | shift_right_rounded(magnitude - (112u << 23), 13));
    if (exponent < 102) /* below half the smallest subnormal */
        return (uint16_t)sign;
    uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    return (uint16_t)(sign | shift_right_rounded(significand, 126 - exponent));
}

void dtype_f32_to_f16(const float *in, uint64_t n, uint16_t *out)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = f32_bits_to_f16(bits_of(in[i]));
}
