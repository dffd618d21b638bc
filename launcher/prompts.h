/*
 * Prompts as token ids, and what the model says as text: by the built-in byte tokenizer here, by a
 * tokenizer.json in the tokenizer's child (tokenizer_child.h).
 */
#ifndef LAUNCHER_PROMPTS_H
#define LAUNCHER_PROMPTS_H

#include "launcher/launcher.h"

/* ids of all prompts, one after another; `first` (n + 1) says where each begins. Owned. */
struct prompts {
    int32_t *ids;
    int32_t *first;
    uint64_t n;
};

/*
 * What the plan and the model get: a prompt's bytes, or its ids with the tokens that the tokenizer
 * puts before a text. An empty prompt begins where a document ends. ERROR_USER: no environment, no
 * tokenizer.json, an id that the model has not.
 */
int prompts_encode(struct launcher *l, const char *const *texts, uint64_t n, struct prompts *out);

/* What gpu_worker generated for `prompts`, copied out of shared memory; freed by the caller.
 * ERROR_DAMAGED: its numbers are not this plan's. */
int prompts_take_generated(const struct launcher *l, const struct prompts *prompts,
                           struct generated **out);

/*
 * The text of each continuation (generated ids, `counts` of them for each prompt): texts[p] is
 * allocated and bytes[p] long, special tokens left out. Pieces of characters that the model did not
 * finish are U+FFFD with a tokenizer.json, and what they are with bytes.
 */
int prompts_decode(struct launcher *l, const struct prompts *prompts, struct generated *generated,
                   char **texts, uint64_t *bytes);

/* The same without waiting: begun, then turn after turn. `texts` and `bytes` outlive it and are the
 * caller's to free however it ends. */
struct decoding;
int prompts_decode_begin(struct decoding **decoding, struct launcher *l,
                         const struct prompts *prompts, struct generated *generated, char **texts,
                         uint64_t *bytes);
/* 1: it goes on; 0: the texts are there; negative: it failed. Unless 1, *decoding is NULL. */
int prompts_decode_turn(struct decoding **decoding);
void prompts_decode_drop(struct decoding **decoding); /* may be NULL */

void prompts_free(struct prompts *prompts);

#endif
