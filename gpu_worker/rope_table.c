#include "gpu_worker/rope_table.h"

#include <string.h>

#include "gpu_worker/scalar.h"

static const float two_pi = 6.283185307179586f;

/* Llama 3.1: long wavelengths are divided by the factor, short ones kept, blended between. */
static float scale_llama3(const struct model_rope *rope, float frequency)
{
    double original = (double)rope->original_max_position;
    float low = (float)rope->low_freq_factor, high = (float)rope->high_freq_factor;
    float factor = (float)rope->factor;
    float wavelength = two_pi / frequency;
    if (wavelength < (float)(original / rope->high_freq_factor))
        return frequency;
    if (wavelength > (float)(original / rope->low_freq_factor))
        return frequency / factor;
    float smooth = ((float)original / wavelength - low) / (high - low);
    return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

void rope_table_frequencies(const struct model_rope *rope, uint64_t dim, float *frequency)
{
    for (uint64_t i = 0; i < dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)dim;
        float power = (float)scalar_exp((double)exponent * scalar_log(rope->theta));
        float f = 1.0f / power;
        switch ((enum model_rope_scaling)rope->scaling) {
        case ROPE_SCALING_NONE:
            break;
        case ROPE_SCALING_LINEAR:
            f = f / (float)rope->factor;
            break;
        case ROPE_SCALING_LLAMA3:
            f = scale_llama3(rope, f);
            break;
        }
        frequency[i] = f;
    }
}

static float round_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000; /* finite: a cosine */
    memcpy(&x, &bits, sizeof bits);
    return x;
}

void rope_table_fill(const float *frequency, uint64_t half_dim, uint64_t positions,
                     enum device_dtype dtype, float *cosine, float *sine)
{
    for (uint64_t position = 0; position < positions; position++)
        for (uint64_t i = 0; i < half_dim; i++) {
            float angle = (float)position * frequency[i];
            double s, c;
            scalar_sine_cosine((double)angle, &s, &c);
            uint64_t at = position * half_dim + i;
            cosine[at] = dtype == DEVICE_BF16 ? round_bf16((float)c) : (float)c;
            sine[at] = dtype == DEVICE_BF16 ? round_bf16((float)s) : (float)s;
        }
}
