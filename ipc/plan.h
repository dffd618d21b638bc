/*
 * The plan: everything a worker needs to know, resolved by the launcher from the run file, the
 * model's config.json and the machine, written once before any worker starts and read-only
 * afterwards.
 *
 * Plain data without pointers, since every process maps it where it likes. Texts (paths, prompts,
 * patterns) stand behind the struct in the same region; a plan_text says where.
 */
#ifndef IPC_PLAN_H
#define IPC_PLAN_H

#include <stdint.h>

#include "ipc/topology.h"
#include "model/config.h"
#include "model/layout.h"

#define PLAN_CHECKPOINT_AUTO UINT32_MAX

#define PLAN_MAGIC 0x314e414c50544dull /* "MTPLAN1" */

enum {
    PLAN_LAYOUT_VERSION = 1,
    PLAN_LISTS_MAX = 65536,    /* entries over all text lists */
    PLAN_ENDPOINT_BYTES = 108, /* sun_path: a longer ipc path fails to bind */
    PLAN_TOKEN_BYTES = 33,     /* 32 hexadecimal digits that a peer must know */
    PLAN_SLACK_STEPS = 4, /* per-step places in the control pages; two steps may be in flight */
};

enum plan_mode {
    PLAN_TRAIN,    /* all workers */
    PLAN_EVALUATE, /* io and gpu: forward only over plan.data */
    PLAN_GENERATE, /* io and gpu: sample from plan.prompts */
    PLAN_DIGEST,   /* io alone: hashes recomputed from the bytes on disk */
    PLAN_SCRUB,    /* io alone: every byte of the store verified, nothing written */
    PLAN_EXPORT,   /* io alone: a Hugging Face folder from the newest commit */
    PLAN_VALIDATE, /* io alone: data and weights checked, nothing written but the token cache */
};

enum plan_format { PLAN_FORMAT_AUTO, PLAN_FORMAT_TEXT, PLAN_FORMAT_TOKENS };

enum plan_engine { PLAN_ENGINE_AUTO, PLAN_ENGINE_URING, PLAN_ENGINE_SYNC };

enum plan_weights { PLAN_WEIGHTS_STORE, PLAN_WEIGHTS_FOLDER, PLAN_WEIGHTS_RANDOM };

/* Where a text stands: bytes from the start of the plan; 0 = none. Always terminated. */
struct plan_text {
    uint64_t offset;
};

struct plan_texts {
    uint64_t offset; /* of an array of struct plan_text */
    uint64_t count;
};

/* A list of token ids, or of places in one. */
struct plan_ids {
    uint64_t offset; /* of int32_t [count] */
    uint64_t count;
};

/* The frames of one pool (of one instance, for a per-worker pool). */
struct plan_pool {
    uint64_t frame_bytes; /* what a frame must hold */
    uint64_t stride; /* from frame to frame: an odd multiple of 4096 (against 4 KiB aliasing) */
    uint64_t frames;
};

/* Where a region lies in the shared segment. */
struct plan_region {
    uint64_t offset; /* of instance 0, page aligned */
    uint64_t stride; /* from instance to instance; bytes of one, page aligned */
    uint64_t instances;
};

struct plan_data {
    struct plan_texts train, validation;
    double val_fraction;
    uint32_t format; /* enum plan_format */
    uint32_t packing, shuffle;
    uint32_t drop_overlong; /* conversations longer than a sample; 0: truncated */
    uint32_t tokenizer_is_bytes;
    struct plan_text tokenizer;
    struct plan_text cache_dir;
};

struct plan_checkpoint {
    uint64_t export_interval; /* steps; 0 = only at the end */
    uint64_t keep;            /* exports kept */
    int32_t export_dtype;     /* enum model_dtype, or -1: as the source's tensor */
    struct plan_text export_dir;
};

struct plan_generate {
    struct plan_texts prompts;
    struct plan_ids prompt_ids;   /* of all prompts, one after another */
    struct plan_ids prompt_first; /* (prompts + 1): where each begins; at least one id each */
    uint64_t max_new_tokens;
    double temperature; /* 0: greedy */
    double top_p;
    uint64_t seed;
};

struct plan {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t mode;  /* enum plan_mode */
    uint64_t bytes; /* of the PLAN region in use: struct and texts */
    uint32_t generation;
    uint32_t opt_workers;
    uint32_t frame_hashes; /* 1: lent frames are hashed where born and compared where used */
    uint8_t run_uuid[16];
    uint8_t bits_hash[16]; /* of the configuration keys that determine bits */
    char token[PLAN_TOKEN_BYTES];
    char endpoint[PLAN_ENDPOINT_BYTES];
    struct plan_text output_dir, log_dir;
    uint64_t log_bytes_max;

    struct model_config model;
    struct plan_text model_dir;
    uint32_t weights; /* enum plan_weights: where version 0 comes from */
    uint32_t bf16;    /* 1: bfloat16 compute, split master weights; 0: float32 */
    uint64_t page_elements;
    struct plan_texts no_decay;
    double recompute; /* part of the optimizer's blocks that is computed a second time */

    uint64_t seed;
    uint64_t seq_len;
    uint64_t micro_batch_size; /* sequences */
    uint64_t microbatches;     /* gradient_accumulation_steps */
    uint32_t
        checkpoint_every; /* activation checkpointing: 1 = full, N = every N blocks, 0 = none,
                             or PLAN_CHECKPOINT_AUTO: gpu_worker chooses, and says so in its page */
    uint32_t threads;     /* compute threads of the CPU device */

    uint64_t device_bytes_max; /* what max_ram leaves for the CPU device's buffers */

    struct plan_texts offload_dirs;
    uint32_t slots_per_page; /* 3; 2 without verify_writes */
    uint32_t io_engine;      /* enum plan_engine */
    uint32_t resume_never;   /* 1: an existing commit is refused */
    uint32_t store_expected; /* 1: steps of this run were committed, so a store without a commit is
                                refused */
    int32_t launcher_pid;    /* filled in by segment_create() */
    uint64_t prefetch;       /* STATE pages read ahead per opt_worker; 0 = predict */

    uint64_t evaluate_sequences;
    struct plan_data data;
    struct plan_checkpoint checkpoint;
    struct plan_generate generate;

    struct plan_pool pools[REGION_COUNT]; /* of the pool regions; else zero */
    uint64_t ring_depth[RING_COUNT];
    struct plan_region regions[REGION_COUNT];
    struct plan_region ring_producers[RING_COUNT], ring_consumers[RING_COUNT];
    uint64_t segment_bytes;
    uint64_t check; /* plan_check(); filled in by segment_create() */
};

/* xxh3 of the `bytes` bytes of a plan, `check` taken as zero: workers refuse a damaged plan, since
 * they go by every one of its sizes, texts and numbers. */
uint64_t plan_check(const struct plan *plan);

static inline const char *plan_text_get(const struct plan *plan, struct plan_text text)
{
    return text.offset ? (const char *)plan + text.offset : "";
}

static inline const char *plan_texts_get(const struct plan *plan, struct plan_texts texts,
                                         uint64_t i)
{
    const struct plan_text *list =
        (const struct plan_text *)(const void *)((const char *)plan + texts.offset);
    return plan_text_get(plan, list[i]);
}

static inline const int32_t *plan_ids_get(const struct plan *plan, struct plan_ids ids)
{
    return (const int32_t *)(const void *)((const char *)plan + ids.offset);
}

/* Appends a text behind the struct while the launcher builds the plan in a buffer of `capacity`
 * bytes. Negative (error_set) when the texts do not fit. */
int plan_text_add(struct plan *plan, uint64_t capacity, const char *text, struct plan_text *out);
int plan_texts_add(struct plan *plan, uint64_t capacity, const char *const *texts, uint64_t count,
                   struct plan_texts *out);

int plan_ids_add(struct plan *plan, uint64_t capacity, const int32_t *ids, uint64_t count,
                 struct plan_ids *out);

/* Fills regions, ring places and segment_bytes from pools, ring depths and opt_workers. */
void plan_place_regions(struct plan *plan, const struct model_layout *layout);

/* A frame's stride: the smallest odd multiple of 4096 that holds it. */
uint64_t plan_frame_stride(uint64_t bytes);

#endif
