/*
 * From configuration, model and machine to the plan that every worker reads.
 *
 * The memory arithmetic stands here too: what the shared segment takes is computed before anything
 * is allocated, and what is left of the budget is the device's.
 */
#ifndef LAUNCHER_PLAN_BUILD_H
#define LAUNCHER_PLAN_BUILD_H

#include "launcher/launcher.h"

/* What a command asks for beyond the run's configuration. */
struct plan_request {
    enum plan_mode mode;
    int weights_from_store; /* EVALUATE, GENERATE: a run's newest commit, not its source folder */
    uint32_t generation;
    const char *export_dir;     /* EXPORT: where to; else NULL */
    const char *const *prompts; /* GENERATE; TRAIN: samples */
    uint64_t n_prompts;
    const struct prompts *encoded; /* their ids (prompts.h) */
    uint64_t max_new_tokens;
    double temperature, top_p;
    uint64_t sampling_seed;
};

/* Reads the model's config.json and makes the layout that the configuration's page size gives.
 * Released by model_layout_destroy(). */
int plan_load_model(const struct config *config, struct model_layout *layout);

/* Do model, tokenizer and what is asked of them go together? 0 or ERROR_USER; plan_build() asks it,
 * too. */
int plan_check_model(const struct launcher *l);

/* Builds the plan in fresh memory (*plan, released by free()). ERROR_FIT with the arithmetic when
 * the budget does not hold it; ERROR_USER when model, tokenizer and data do not go together. */
int plan_build(struct plan **plan, const struct launcher *l, const struct plan_request *request);

#endif
