/* Mixtures of experts in config.json: how many, in which blocks, and the load balancing loss. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/config_forms.h"
#include "procs/error.h"

static const char count_key[] = "num_experts", local_count_key[] = "num_local_experts",
                  per_token_key[] = "num_experts_per_tok", size_key[] = "moe_intermediate_size",
                  step_key[] = "decoder_sparse_step", only_key[] = "mlp_only_layers",
                  norm_key[] = "norm_topk_prob", loss_key[] = "output_router_logits",
                  coefficient_key[] = "router_aux_loss_coef";

/* The class calls the one key the other's name: both are read, and mean the same. */
static int read_count(const struct config_source *s, struct model_config *config)
{
    uint64_t local = 0, count = 0;
    int rc = config_read_size(s, local_count_key, MODEL_EXPERTS_MAX, &local);
    if (rc == 0)
        rc = config_read_size(s, count_key, MODEL_EXPERTS_MAX, &count);
    if (rc < 0)
        return rc;
    if (local && count && local != count)
        return config_refuse(s, local_count_key, "the same as num_experts",
                             config_lookup(s->root, local_count_key));
    if (local || count)
        config->n_experts = local ? local : count;
    return 0;
}

static int read_sizes(const struct config_source *s, const struct config_family *family,
                      struct model_config *config)
{
    int rc = read_count(s, config);
    if (rc == 0)
        rc = config_read_size(s, per_token_key, MODEL_EXPERTS_MAX, &config->experts_per_token);
    if (rc == 0 && family->experts == CONFIG_EXPERTS_QWEN)
        rc = config_read_size(s, size_key, 1 << 24, &config->expert_size);
    else
        config->expert_size = config->intermediate_size;
    if (rc < 0)
        return rc;
    if (config->experts_per_token > config->n_experts)
        return error_set(ERROR_USER,
                         "%s: %s: expected at most the number of experts %" PRIu64
                         ", found %" PRIu64,
                         s->where, per_token_key, config->n_experts, config->experts_per_token);
    return 0;
}

static int set_dense(const struct config_source *s, const json_t *list, struct model_config *config)
{
    size_t i;
    json_t *value;
    if (list && !json_is_array(list))
        return config_refuse(s, only_key, "a list of numbers of blocks", list);
    json_array_foreach(list, i, value)
    {
        json_int_t block = json_integer_value(value);
        if (!json_is_integer(value) || block < 0)
            return config_refuse(s, only_key, "a list of numbers of blocks", list);
        if ((uint64_t)block < config->n_layers)
            config->sparse[block / 8] &= (uint8_t) ~(1U << (block % 8));
    }
    return 0;
}

/* Every decoder_sparse_step-th block that mlp_only_layers does not name. */
static int read_blocks(const struct config_source *s, const struct config_family *family,
                       struct model_config *config)
{
    uint64_t every = 1;
    int rc = 0, qwen = family->experts == CONFIG_EXPERTS_QWEN;
    if (qwen)
        rc = config_read_size(s, step_key, MODEL_BLOCKS_MAX, &every);
    for (uint64_t b = 0; rc == 0 && b < config->n_layers; b++)
        if ((b + 1) % every == 0)
            config->sparse[b / 8] |= (uint8_t)(1U << (b % 8));
    if (rc == 0 && qwen)
        rc = set_dense(s, config_lookup(s->root, only_key), config);
    if (rc < 0)
        return rc;
    uint64_t sparse = model_config_n_sparse(config);
    if (sparse == 0)
        return error_set(ERROR_USER,
                         "%s: %s, %s: expected at least one block with experts, found none",
                         s->where, step_key, only_key);
    if (sparse * config->n_experts > MODEL_MODEL_EXPERTS_MAX)
        return error_set(
            ERROR_USER, "%s: %s: expected at most %d experts in all blocks, found %" PRIu64,
            s->where, local_count_key, MODEL_MODEL_EXPERTS_MAX, sparse * config->n_experts);
    return 0;
}

/* The library adds the loss only where it also returns what the loss is computed from. */
static int read_loss(const struct config_source *s, struct model_config *config)
{
    double coefficient = 0.001; /* the default of both classes */
    uint32_t wanted = 0;
    int rc = config_read_real(s, coefficient_key, 0.0, 1e6, &coefficient);
    if (rc == 0)
        rc = config_read_flag(s, loss_key, &wanted);
    config->router_aux_loss = wanted ? coefficient : 0.0;
    return rc;
}

int config_read_experts(const struct config_source *s, const struct config_family *family,
                        struct model_config *config)
{
    if (family->experts == CONFIG_EXPERTS_NONE)
        return 0;
    int rc = read_sizes(s, family, config);
    if (rc == 0)
        rc = read_blocks(s, family, config);
    if (rc == 0)
        rc = read_loss(s, config);
    if (rc == 0 && family->experts == CONFIG_EXPERTS_QWEN)
        rc = config_read_flag(s, norm_key, &config->norm_topk);
    return rc;
}

int config_experts_reads(const struct config_family *family, const char *key)
{
    static const char *const both[] = {count_key, local_count_key, per_token_key, loss_key,
                                       coefficient_key};
    static const char *const qwen[] = {size_key, step_key, only_key, norm_key};
    if (family->experts == CONFIG_EXPERTS_NONE)
        return 0;
    for (size_t i = 0; i < sizeof both / sizeof both[0]; i++)
        if (strcmp(key, both[i]) == 0)
            return 1;
    for (size_t i = 0; i < sizeof qwen / sizeof qwen[0]; i++)
        if (family->experts == CONFIG_EXPERTS_QWEN && strcmp(key, qwen[i]) == 0)
            return 1;
    return 0;
}
