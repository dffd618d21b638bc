/*
 * Element types: their names in safetensors and in config.json, their sizes, and the conversions
 * between float32 and the 16-bit floats. Conversions are pure bit arithmetic: they depend on no
 * rounding mode, no flush-to-zero setting and no hardware.
 */
#ifndef MODEL_DTYPE_H
#define MODEL_DTYPE_H

#include <stdint.h>

/* enumerator, name in safetensors, bytes per element */
#define MODEL_DTYPES(X)                                                                            \
    X(DTYPE_F32, "F32", 4)                                                                         \
    X(DTYPE_BF16, "BF16", 2)                                                                       \
    X(DTYPE_F16, "F16", 2)                                                                         \
    X(DTYPE_F64, "F64", 8)                                                                         \
    X(DTYPE_F8_E4M3, "F8_E4M3", 1)                                                                 \
    X(DTYPE_F8_E5M2, "F8_E5M2", 1)                                                                 \
    X(DTYPE_F8_E8M0, "F8_E8M0", 1)                                                                 \
    X(DTYPE_C64, "C64", 8)                                                                         \
    X(DTYPE_I64, "I64", 8)                                                                         \
    X(DTYPE_U64, "U64", 8)                                                                         \
    X(DTYPE_I32, "I32", 4)                                                                         \
    X(DTYPE_U32, "U32", 4)                                                                         \
    X(DTYPE_I16, "I16", 2)                                                                         \
    X(DTYPE_U16, "U16", 2)                                                                         \
    X(DTYPE_I8, "I8", 1)                                                                           \
    X(DTYPE_U8, "U8", 1)                                                                           \
    X(DTYPE_BOOL, "BOOL", 1)

enum model_dtype {
#define MODEL_DTYPE_ENUM(id, name, bytes) id,
    MODEL_DTYPES(MODEL_DTYPE_ENUM)
#undef MODEL_DTYPE_ENUM
        DTYPE_COUNT
};

/* Bytes per element. */
uint64_t model_dtype_bytes(enum model_dtype dtype);

/* The name as safetensors spells it: "F32", "BF16", ... */
const char *model_dtype_name(enum model_dtype dtype);

/* From safetensors' spelling. Returns 0, or -1 (no error set) for an unknown name. */
int model_dtype_from_name(const char *name, enum model_dtype *dtype);

/* "float32", "bfloat16", "float16" as config.json and the run file spell them; NULL for others. */
const char *model_dtype_torch_name(enum model_dtype dtype);

/* From the spelling of torch. Returns 0, or -1 (no error set) for anything but the three above. */
int model_dtype_from_torch_name(const char *name, enum model_dtype *dtype);

/* out[i] = in[i], exactly. in: (n) bf16; out: (n) f32; they may not overlap. */
void dtype_bf16_to_f32(const uint16_t *in, uint64_t n, float *out);

/* out[i] = in[i], exactly, subnormals too; a signalling NaN becomes quiet. in: (n) f16; out: (n)
 * f32. */
void dtype_f16_to_f32(const uint16_t *in, uint64_t n, float *out);

/* Rounds to nearest, ties to even; overflow gives infinity, NaN stays (quiet) NaN. out: (n) bf16.
 */
void dtype_f32_to_bf16(const float *in, uint64_t n, uint16_t *out);

/* Rounds to nearest, ties to even, subnormals too; beyond 65504 infinity. out: (n) f16. */
void dtype_f32_to_f16(const float *in, uint64_t n, uint16_t *out);

#endif
