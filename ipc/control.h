/*
 * Control memory: the truth about the step protocol, in shared pages with one writer each.
 *
 * The launcher writes orders (what may begin), each worker writes facts (what is done). Messages
 * only say "look again": every wait re-reads these pages, so a lost, doubled or late message costs
 * at most 100 ms.
 *
 * Orders are counters of steps: a worker that sees begin_step >= s may begin step s. What belongs
 * to a step stands in orders[s % PLAN_SLACK_STEPS], complete before the counter says so (release
 * store, acquire load), and is not written again before every worker is past it: two steps are in
 * flight.
 *
 *     launcher                             workers
 *     begin_step = s          ----->       gpu: forward s, then backward s; io: microbatches,
 * weights
 *                             <-----       gpu: forward_step = s (loss), backward_step = s
 *                             <-----       opt i: norm_step = s
 *     apply_step = s {lr,scale} ---->      opt i: AdamW page by page; io: reads state, writes slots
 *     begin_step = s + 1      ----->       (behind the apply)
 *                             <-----       io: complete_step = s (every page written and flushed,
 * hashed) commit_step = s {loss, norm} -->     io: digest table, record
 *                             <-----       io: committed_step = s
 *
 * Restart of one worker (DESIGN's T1; launcher/restart.h drives it, ipc/worker.h has the workers'
 * part):
 *
 *     abort_generation = g + 1 ---->       every survivor leaves its operation at the next
 * boundary, waits for its own transfers
 *                             <-----       acknowledged = g + 1
 *     (the dead one is reaped)
 *     generation = g + 1      ----->       own ring cursors to 0; the dead one's successor starts,
 *                                          behind the fence
 *                             <-----       ready = g + 1
 *     counters back to the newest complete step
 *     running_generation = g + 1 -->       go on from there
 */
#ifndef IPC_CONTROL_H
#define IPC_CONTROL_H

#include <stdatomic.h>
#include <stdint.h>

#include "ipc/plan.h"
#include "ipc/spike_window.h"

enum {
    CONTROL_PANIC_BYTES = 1024,
    CONTROL_ERROR_BYTES = 4096,
    CONTROL_LINEAGE_BYTES = 512,
    CONTROL_IO_TEXT_BYTES = 512,
};

/* What one step needs beyond its number. Written by the launcher before the counter moves. */
struct step_orders {
    uint64_t step;
    uint64_t t;       /* AdamW's step count: updates applied so far, this one included */
    uint32_t skip;    /* 1: the norm was not usable; no page changes */
    uint32_t commits; /* 1: this step will be committed (durability) */
    float learning_rate;
    float lr_decay;       /* lr * weight_decay */
    float step_size;      /* lr / (1 - beta1^t) */
    float inv_sqrt_bias2; /* 1 / sqrt(1 - beta2^t) */
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float eps, scale;  /* scale: gradient clipping */
    double loss, norm; /* mean loss over labelled tokens; gradient norm before clipping */
    uint64_t labelled; /* tokens with a label */
};

/* Written by the launcher alone. */
struct launcher_control {
    uint64_t magic;
    _Atomic uint32_t stopping;         /* 1: leave now; the step in flight is abandoned */
    _Atomic uint32_t abort_generation; /* workers of an older generation stop, acknowledge, wait */
    _Atomic uint32_t generation;       /* all have: rings restart from 0, READY again */
    _Atomic uint32_t running_generation; /* all are READY: rings may be used */
    _Atomic uint64_t begin_step;         /* forward and backward may run up to here */
    _Atomic uint64_t apply_step;         /* STEP_APPLY or skip decided up to here */
    _Atomic uint64_t commit_step;        /* may be committed up to here */
    _Atomic uint64_t evaluate_request;   /* number of evaluations asked for */
    _Atomic uint64_t generate_request;   /* number of generations asked for */
    _Atomic uint64_t export_step;        /* export the version of this step */
    struct step_orders orders[PLAN_SLACK_STEPS];
};

/* A span of work, for ETA lines: what the worker does now and how far it is. */
struct worker_progress {
    _Atomic uint32_t activity;    /* enum worker_activity */
    _Atomic uint64_t done, total; /* bytes; FENCE: milliseconds */
};

#define WORKER_ACTIVITY_LIST(X)                                                                    \
    X(STARTING, "starting")                                                                        \
    X(TOKENIZING, "reading text")                                                                  \
    X(ZEROING, "zero-filling the store")                                                           \
    X(IMPORTING, "importing the model")                                                            \
    X(FENCE, "waiting for the last I/O of a killed process")                                       \
    X(RECOVERING, "verifying the newest commit")                                                   \
    X(TAKEOVER, "taking over from the worker that died")                                           \
    X(SCRUBBING, "verifying the store")                                                            \
    X(LOADING, "loading weights")                                                                  \
    X(WORKING, "working")                                                                          \
    X(EXPORTING, "exporting")

enum worker_activity {
#define X(name, text) ACTIVITY_##name,
    WORKER_ACTIVITY_LIST(X)
#undef X
        ACTIVITY_COUNT
};

/*
 * What a worker does between two heartbeats, and how long that may take before any was measured.
 * The watchdog's deadline is the larger of this floor and ten times the 99th percentile seen.
 *      name      text                              floor in seconds */
#define WORKER_OPERATION_LIST(X)                                                                   \
    X(START, "start-up", 600)                                                                      \
    X(IDLE, "waiting", 60)                                                                         \
    X(STOP, "stopping for a restart", 60)                                                          \
    X(PAGE, "moving pages", 60)                                                                    \
    X(COMPUTE, "computing a layer", 120)                                                           \
    X(NORM, "a gradient norm", 60)                                                                 \
    X(APPLY, "an AdamW update", 60)                                                                \
    X(EXPORT, "an export", 600)

enum worker_operation {
#define X(name, text, floor_s) OPERATION_##name,
    WORKER_OPERATION_LIST(X)
#undef X
        OPERATION_COUNT
};

enum { CONTROL_BEAT_BUCKETS = 40 };

/* A block whose second computation gave other bits than its first (optimizer.recompute). */
struct recompute_finding {
    uint64_t step, page, block, element; /* the first that differs, counted within the page */
    uint32_t part;                       /* enum page_part */
    uint32_t wrong;   /* computation that was alone: 0 the update, 1 the second */
    int32_t cores[3]; /* CPU numbers of the three */
};

enum { CONTROL_FINDINGS = 8 }; /* newest kept; the launcher looks at least every 100 ms */

/* What a gpu_worker found in one step's forward. */
struct step_result {
    uint64_t step;
    uint64_t labelled;                /* tokens with a label */
    uint64_t tokens;                  /* positions computed */
    double loss_sum;                  /* over labelled tokens; mean = loss_sum / labelled */
    uint64_t begin_ns;                /* clock at the first use of this step's weights */
    uint64_t forward_ns, backward_ns; /* clock at the end of each */
};

/* Written by its worker alone. One struct for all roles: a role leaves what it does not know zero.
 */
struct worker_control {
    uint64_t magic;
    uint32_t role, index;
    _Atomic int32_t pid;    /* written last at the introduction: from then on the page is this
                               process's, not its predecessor's */
    uint32_t incarnation;   /* the generation in which this process was started */
    _Atomic uint32_t ready; /* the generation for which it is set up, waiting for orders */
    _Atomic uint32_t acknowledged; /* the abort_generation for which it has stopped */
    _Atomic uint32_t sleeping;     /* 1: about to poll, ring the bell */
    _Atomic uint64_t turns;        /* of the main loop in which something was done: no waiting */
    _Atomic uint64_t heartbeat; /* turns of the main loop; gpu: also work items of an operation */
    _Atomic uint32_t operation; /* enum worker_operation: what the next beat is waited for */
    /* how long each operation took from beat to beat: [i] counts those of 2^i to 2^(i+1) us */
    _Atomic uint32_t beats[OPERATION_COUNT][CONTROL_BEAT_BUCKETS];
    struct worker_progress progress;
    _Atomic uint64_t wait_ns[RING_COUNT]; /* time slept for want of each ring, since the start */

    /* gpu */
    _Atomic uint64_t forward_step, backward_step;
    _Atomic uint64_t evaluated; /* evaluations done; result below */
    _Atomic uint64_t generated; /* generations done; tokens in GENERATED */
    _Atomic uint64_t
        sweep_request; /* forward-only sweeps over the weights that gpu wants from io */
    _Atomic uint64_t evaluate_tokens;
    _Atomic double evaluate_loss_sum;
    uint64_t device_bytes;
    uint32_t checkpoint_every; /* the mode chosen: valid from READY on */
    struct step_result results[PLAN_SLACK_STEPS];

    /* opt */
    _Atomic uint64_t norm_step;
    _Atomic uint64_t pages_updated;
    _Atomic uint64_t n_findings; /* finding n stands at n % CONTROL_FINDINGS before n counts */
    struct recompute_finding findings[CONTROL_FINDINGS];

    /* io */
    _Atomic uint64_t complete_step, committed_step;
    _Atomic uint64_t exported_step;   /* exports are done with up to here, well or badly */
    _Atomic uint64_t export_given_up; /* newest of them that failed; set before exported_step */
    _Atomic uint32_t flushing; /* 1: a flush is on its way whose result may be lost with io */
    _Atomic uint64_t bytes_read, bytes_written;
    _Atomic uint64_t evaluate_microbatches, evaluate_sequences; /* of one evaluation */
    uint64_t samples;                                           /* training samples of one epoch */
    uint64_t resume_step, resume_t,
        resume_data_position; /* of the newest complete step, at READY */
    uint32_t spike_count;     /* at READY: losses and norms of the last steps, oldest first */
    double spike_loss[SPIKE_WINDOW_STEPS], spike_norm[SPIKE_WINDOW_STEPS];
    _Atomic uint64_t oldest_io_ns;         /* submission of the oldest request in flight, or 0 */
    char oldest_io[CONTROL_IO_TEXT_BYTES]; /* that request, once it is a second old */
    uint64_t store_bytes;
    uint64_t apply_begin_ns[PLAN_SLACK_STEPS], complete_ns[PLAN_SLACK_STEPS],
        committed_ns[PLAN_SLACK_STEPS];
    uint8_t state_hash[PLAN_SLACK_STEPS][16]; /* of complete step s at s % PLAN_SLACK_STEPS */
    uint8_t weights_hash[16];                 /* digest command */
    uint64_t damages;                         /* scrub command: places found damaged */

    char lineage[CONTROL_LINEAGE_BYTES]; /* gpu: what bits depend on; io: that of the newest commit
                                          */

    /* last words */
    _Atomic uint32_t error_kind;
    char error[CONTROL_ERROR_BYTES];
    char panic[CONTROL_PANIC_BYTES];
    char export_error[CONTROL_ERROR_BYTES]; /* why export_given_up could not be written */
    char message[CONTROL_ERROR_BYTES]; /* what the user should be told at READY, one line each */
};

#define CONTROL_MAGIC 0x4c5254434dull

/* NORM region of one opt_worker: entry r is the page of rank r among its own. */
struct norm_entry {
    _Atomic uint64_t step;
    double sum_of_squares;
    uint64_t gradient_hash; /* of the page's gradient: equal in a repetition of the step */
};

/* GENERATED: per prompt a count, then the tokens (prompt excluded). */
struct generated {
    uint64_t prompts, tokens_max;
    /* uint64_t counts[prompts]; int32_t tokens[prompts][tokens_max] */
};
static inline uint64_t *generated_counts(struct generated *g)
{
    return (uint64_t *)(void *)(g + 1);
}
static inline int32_t *generated_tokens(struct generated *g, uint64_t prompt)
{
    return (int32_t *)(void *)(generated_counts(g) + g->prompts) + prompt * g->tokens_max;
}
static inline uint64_t generated_bytes(uint64_t prompts, uint64_t tokens_max)
{
    return sizeof(struct generated) + prompts * sizeof(uint64_t) +
           prompts * tokens_max * sizeof(int32_t);
}

/* STATE_RETURN: what became of the image. */
enum state_return_kind {
    STATE_RETURN_USED,
    STATE_RETURN_BAD, /* its digests are wrong: read it once more, lend it again with the same OUT
                       */
};

/* A MICROBATCH frame: four arrays (B, T) int32. */
enum microbatch_kind { MICROBATCH_TRAIN, MICROBATCH_EVALUATE };
static inline uint64_t microbatch_bytes(uint64_t batch, uint64_t seq_len)
{
    return 4 * batch * seq_len * sizeof(int32_t);
}

#endif
