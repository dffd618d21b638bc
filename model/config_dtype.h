/*
 * A config.json that says another dtype, and is otherwise the same text.
 */
#ifndef MODEL_CONFIG_DTYPE_H
#define MODEL_CONFIG_DTYPE_H

#include <stddef.h>

#include "model/dtype.h"

/*
 * Copies json (n bytes, an object that model_config_parse() accepted) with the values of its
 * top-level keys "torch_dtype" and "dtype" replaced; where it has neither, "torch_dtype" is added
 * in front. Numbers keep their digits and keys their order, which a JSON library would not promise.
 * dtype: F32, BF16 or F16. *out is allocated (n_out bytes), freed by the caller. -ERROR_USER when
 * the text is no JSON object, -ERROR_FAILED for memory.
 */
int model_config_set_dtype(const char *json, size_t n, enum model_dtype dtype, char **out,
                           size_t *n_out);

#endif
