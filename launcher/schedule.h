/*
 * The learning rate, AdamW's scalars and the clipping factor: pure functions of the step.
 *
 * Nothing here has state, so a resumed run and a run that never stopped get the same bits, and a
 * step that is redone is redone with the same numbers. Everything is computed in f64; what workers
 * use is rounded once to f32 and sent as bits.
 *
 * Update k = step - 1 of S steps, w of them warm-up, base rate lr, floor ratio r:
 *
 *     k < w        lr (k + 1) / w
 *     constant     lr
 *     linear       lr (1 - (1 - r) p)                          p = (k - w) / (S - w), at most 1
 *     cosine       lr (r + (1 - r) (1 + cos(pi p)) / 2)
 *     wsd          lr (1 - (1 - r) q)                          q = (k - (S - D)) / D, 0 to 1,
 *                                                              D = decay_ratio S
 *
 * p is below 1 in the last step: the floor would be reached by update S + 1, as in transformers and
 * torch. Two differences from transformers: its warm-up begins at k / w, so that the first update
 * has rate 0 and moves nothing; ours begins at 1 / w (as torchtitan's). And its linear schedule has
 * no floor (r = 0).
 */
#ifndef LAUNCHER_SCHEDULE_H
#define LAUNCHER_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>

struct config;

enum schedule_type {
    SCHEDULE_CONSTANT,
    SCHEDULE_LINEAR,
    SCHEDULE_COSINE,
    SCHEDULE_WSD,
};

struct schedule {
    enum schedule_type type;
    uint64_t steps;        /* S, the planned length; run.stop_after_step does not change it */
    uint64_t warmup_steps; /* w; S or more is legal: the run ends while warming up */
    double learning_rate;
    double min_lr_ratio; /* r */
    double decay_ratio;  /* wsd: D / S */
    double beta1, beta2, eps, weight_decay;
};

/*
 * What one AdamW update needs, rounded from f64 to f32. The update, as torch defines it
 * (torch.optim.AdamW, single tensor, amsgrad off):
 *
 *     w -= decay * w;                       torch: w *= keep
 *     m = beta1 * m + one_minus_beta1 * g;  torch >= 2: m += one_minus_beta1 * (g - m)
 *     v = beta2 * v + one_minus_beta2 * g * g;
 *     w -= step_size * m / (sqrt(v) * inv_sqrt_bias2 + eps);   torch: sqrt(v) / sqrt(1 - beta2^t)
 *
 * The right-hand forms are equal in exact arithmetic and differ from ours in the last f32 bit.
 * `keep` is torch's factor; near 1 an f32 has steps of 6e-8, so for lr * weight_decay of 1e-6
 * torch's decay is off by up to 3 %, which `w -= decay * w` avoids.
 */
struct schedule_scalars {
    float learning_rate;
    float decay;          /* learning_rate * weight_decay */
    float keep;           /* 1 - learning_rate * weight_decay */
    float step_size;      /* learning_rate / (1 - beta1^t) */
    float inv_sqrt_bias2; /* 1 / sqrt(1 - beta2^t) */
    float beta1, beta2;
    float one_minus_beta1; /* rounded from f64, not f32 1 - beta1 */
    float one_minus_beta2;
    float eps;
};

/*
 * The schedule of a configuration for a run of `steps` steps (training.steps, or what
 * training.epochs comes to). A warmup_ratio becomes ceil(ratio * steps) steps, as in transformers.
 */
void schedule_init(struct schedule *schedule, const struct config *config, uint64_t steps);

/*
 * One line to show the user, or NULL: a warm-up of at least `steps` steps is legal, runs as written
 * and never reaches the learning rate asked for (but in its last step, when they are equal).
 */
const char *schedule_warning(const struct schedule *schedule, char *text, size_t text_bytes);

/* Learning rate of `step` (from 1). Skipped steps count: it depends on nothing but the step. */
double schedule_learning_rate(const struct schedule *schedule, uint64_t step);

/*
 * AdamW's scalars of `step`, which is update number `t` (from 1) of the optimizer: t falls behind
 * the step by the number of skipped steps.
 */
struct schedule_scalars schedule_adamw(const struct schedule *schedule, uint64_t step, uint64_t t);

/*
 * The factor on all gradients: min(1, max_norm / (norm + 1e-6)), torch's clip_grad_norm_ (which
 * computes it in f32). max_norm 0 = off = 1. A NaN norm gives NaN, never 1; the caller skips there.
 */
double schedule_clip_scale(double norm, double max_norm);

#endif
