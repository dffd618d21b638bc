/*
 * Rotary position embedding's table: cos and sin of position x frequency, as transformers has them.
 *
 * Frequencies are 1 / theta^(2i/dim) in f32, then changed as config.json's rope_scaling says (all
 * in f32, as the reference); the angle is the f32 product of position and frequency; its cosine and
 * sine are taken in f64 and rounded to f32 (bf16 for bf16 compute).
 */
#ifndef GPU_WORKER_ROPE_TABLE_H
#define GPU_WORKER_ROPE_TABLE_H

#include <stdint.h>

#include "gpu_worker/device.h"
#include "model/config.h"

/* dim: how many dimensions of a head turn. frequency: (dim/2) f32 */
void rope_table_frequencies(const struct model_rope *rope, uint64_t dim, float *frequency);

/* cosine, sine: (positions, D/2) f32. frequency as above. */
void rope_table_fill(const float *frequency, uint64_t half_dim, uint64_t positions,
                     enum device_dtype dtype, float *cosine, float *sine);

#endif
