/*
 * Where the first weights come from: a checkpoint that fits the layout, or random numbers.
 */
#ifndef MODEL_WEIGHTS_H
#define MODEL_WEIGHTS_H

#include <stdint.h>

#include "model/layout.h"
#include "model/random.h"
#include "model/safetensors.h"

/*
 * The tensor in a checkpoint, under its own name or, where that is absent, the one it has in
 * transformers' base class (GPT-2's wte.weight for transformer.wte.weight). Returns as
 * safetensors_find().
 */
int model_find_weight(const struct model_tensor *tensor, const struct safetensors *st,
                      struct safetensors_tensor *found);

/*
 * Every tensor of the layout is in the checkpoint with its shape and a readable dtype, and the
 * checkpoint holds no other tensor, except buffers that transformers ignores as well
 * (*.rotary_emb.inv_freq; GPT-2's causal masks, *.attn.bias and *.attn.masked_bias) and an
 * lm_head.weight beside tied embeddings.
 * Errors: ERROR_USER naming file, tensor, expected and found.
 */
int model_check_weights(const struct model_layout *layout, const struct safetensors *st);

/*
 * Elements [first, first + count) of the tensor at the start of a run with init = "random":
 * N(0, initializer_range), norms 1 (Gemma's, which add 1: 0), biases 0 (DESIGN 9); GPT-2's
 * projections onto the residual stream N(0, initializer_range / sqrt(2 n_layers)). out: (count)
 * f32. A pure function of seed, tensor and element; not of page size or of how the tensor is cut
 * into calls.
 */
void model_init_random(const struct model_layout *layout, const struct model_tensor *tensor,
                       uint64_t seed, uint64_t first, uint64_t count, float *out);

#endif
