#include "launcher/schedule.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "launcher/config.h"
#include "procs/check.h"

_Static_assert((int)CONFIG_SCHEDULE_CONSTANT == (int)SCHEDULE_CONSTANT &&
                   (int)CONFIG_SCHEDULE_LINEAR == (int)SCHEDULE_LINEAR &&
                   (int)CONFIG_SCHEDULE_COSINE == (int)SCHEDULE_COSINE &&
                   (int)CONFIG_SCHEDULE_WSD == (int)SCHEDULE_WSD,
               "the words of lr_scheduler.type stand in the order of enum schedule_type");

static uint64_t warmup_of(const struct config *config, uint64_t steps)
{
    if (config->lr_scheduler_warmup_ratio > 0.0)
        return (uint64_t)ceil(config->lr_scheduler_warmup_ratio * (double)steps);
    return config->lr_scheduler_warmup_steps;
}

void schedule_init(struct schedule *schedule, const struct config *config, uint64_t steps)
{
    CHECK(steps > 0);
    *schedule = (struct schedule){
        .type = (enum schedule_type)config->lr_scheduler_type,
        .steps = steps,
        .warmup_steps = warmup_of(config, steps),
        .learning_rate = config->optimizer_learning_rate,
        .min_lr_ratio = config->lr_scheduler_min_lr_ratio,
        .decay_ratio = config->lr_scheduler_decay_ratio,
        .beta1 = config->optimizer_betas[0],
        .beta2 = config->optimizer_betas[1],
        .eps = config->optimizer_eps,
        .weight_decay = config->optimizer_weight_decay,
    };
}

const char *schedule_warning(const struct schedule *schedule, char *text, size_t text_bytes)
{
    if (schedule->warmup_steps < schedule->steps)
        return NULL;
    (void)snprintf(text, text_bytes,
                   "warm-up of %" PRIu64 " steps in a run of %" PRIu64
                   ": the learning rate rises to its end and never decays",
                   schedule->warmup_steps, schedule->steps);
    return text;
}

static double clamp01(double x)
{
    return x < 0.0 ? 0.0 : x > 1.0 ? 1.0 : x;
}

/* How much of the run after warm-up lies behind update k >= w; 1 past the end. */
static double progress_of(const struct schedule *schedule, uint64_t k)
{
    if (k >= schedule->steps)
        return 1.0;
    return (double)(k - schedule->warmup_steps) /
           (double)(schedule->steps - schedule->warmup_steps);
}

/* How much of the final decay of wsd lies behind update k. */
static double decay_progress_of(const struct schedule *schedule, uint64_t k)
{
    double length = schedule->decay_ratio * (double)schedule->steps;
    if (k >= schedule->steps)
        return 1.0;
    if (length <= 0.0)
        return 0.0;
    return clamp01(((double)k - ((double)schedule->steps - length)) / length);
}

double schedule_learning_rate(const struct schedule *schedule, uint64_t step)
{
    CHECK(step > 0);
    const double floor_ratio = schedule->min_lr_ratio, fall = 1.0 - floor_ratio;
    uint64_t k = step - 1;
    if (k < schedule->warmup_steps)
        return schedule->learning_rate * (double)step / (double)schedule->warmup_steps;
    double factor = 1.0;
    switch (schedule->type) {
    case SCHEDULE_CONSTANT:
        break;
    case SCHEDULE_LINEAR:
        factor = 1.0 - fall * progress_of(schedule, k);
        break;
    case SCHEDULE_COSINE:
        factor = floor_ratio + fall * 0.5 * (1.0 + cos(M_PI * progress_of(schedule, k)));
        break;
    case SCHEDULE_WSD:
        factor = 1.0 - fall * decay_progress_of(schedule, k);
        break;
    }
    return schedule->learning_rate * factor;
}

struct schedule_scalars schedule_adamw(const struct schedule *schedule, uint64_t step, uint64_t t)
{
    CHECK(t > 0 && t <= step);
    double learning_rate = schedule_learning_rate(schedule, step);
    double decay = learning_rate * schedule->weight_decay;
    double bias1 = 1.0 - pow(schedule->beta1, (double)t);
    double bias2 = 1.0 - pow(schedule->beta2, (double)t);
    return (struct schedule_scalars){
        .learning_rate = (float)learning_rate,
        .decay = (float)decay,
        .keep = (float)(1.0 - decay),
        .step_size = (float)(learning_rate / bias1),
        .inv_sqrt_bias2 = (float)(1.0 / sqrt(bias2)),
        .beta1 = (float)schedule->beta1,
        .beta2 = (float)schedule->beta2,
        .one_minus_beta1 = (float)(1.0 - schedule->beta1),
        .one_minus_beta2 = (float)(1.0 - schedule->beta2),
        .eps = (float)schedule->eps,
    };
}

double schedule_clip_scale(double norm, double max_norm)
{
    if (max_norm == 0.0)
        return 1.0;
    double scale = max_norm / (norm + 1e-6);
    return scale > 1.0 ? 1.0 : scale; /* a NaN stays one */
}
