/*
 * Samples of an evaluation (eval.sample_prompts): what the model said, as text, in the progress and
 * in metrics.jsonl. A tokenizer.json needs a child for that, and nobody waits for it here: worker
 * and signals are watched as ever.
 */
#ifndef LAUNCHER_SAMPLES_H
#define LAUNCHER_SAMPLES_H

#include "launcher/launcher.h"

/* Takes what gpu_worker generated from the version of `step` and begins to decode it.
 * ERROR_DAMAGED: that cannot be what it generated. */
int samples_begin(struct launcher *l, uint64_t step);

/* 1: not there yet. 0: they are told. A decoder that fails stops no training: that is told instead,
 * and the events have no text. */
int samples_turn(struct launcher *l);

/* Forgets what is not told yet: whoever died meanwhile, the samples are drawn again. */
void samples_drop(struct launcher *l);

#endif
