/*
 * What a config.json says in more than one key: rotary embeddings, sliding windows, mixtures of
 * experts. Internal to model/config*.c.
 */
#ifndef MODEL_CONFIG_FORMS_H
#define MODEL_CONFIG_FORMS_H

#include "model/config_families.h"

/* rope_scaling, rope_parameters, rope_theta, ...; head_dim is known. */
int config_read_rope(const struct config_source *s, const struct config_family *family,
                     struct model_config *config);

/* sliding_window, layer_types, ...; n_layers is known. */
int config_read_window(const struct config_source *s, const struct config_family *family,
                       struct model_config *config);

/* num_local_experts, output_router_logits, ...; n_layers and intermediate_size are known. */
int config_read_experts(const struct config_source *s, const struct config_family *family,
                        struct model_config *config);

/* 1 when one of the three reads the key. */
int config_rope_reads(const struct config_family *family, const char *key);
int config_window_reads(const struct config_family *family, const char *key);
int config_experts_reads(const struct config_family *family, const char *key);

#endif
