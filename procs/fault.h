/*
 * Fault points: named places where a test makes this process die, stop or hang.
 *
 *     MTLAUNCH_FAULT="io_before_record:kill"                at the first arrival, SIGKILL
 *     MTLAUNCH_FAULT="opt_mid_apply@opt_worker.1:stop:3"    that worker only, its third arrival
 *
 * A process that is started again arms its fault again. With MTLAUNCH_FAULT_ONCE=<path> the fault
 * acts only if that file does not exist and can be created: once in all processes and starts that
 * share it. The file then says who acted, and when.
 *
 * They are in every build, so that what is tested is what is shipped. Not armed, a fault point is
 * one load and one branch. The name says which role passes it (worker: each of the three) and what
 * has or has not happened by then.
 */
#ifndef PROCS_FAULT_H
#define PROCS_FAULT_H

#include <stdint.h>

#define FAULT_POINTS(X)                                                                            \
    X(worker_attached, "attached to the segment, not yet introduced to the launcher")              \
    X(worker_abandoned, "another worker died: nothing is in flight, that is not acknowledged")     \
    X(worker_acknowledged,                                                                         \
      "another worker died: the operation is given up, the next life not begun")                   \
    X(worker_ready_again, "READY said in a restart of one stage, not told to go on")               \
    X(worker_before_ready, "set up, READY not said")                                               \
    X(io_cache_before_rename, "a token cache whole, not in its place")                             \
    X(io_zero_fill, "a part of the new store is filled with zeros, others not")                    \
    X(io_import_page, "version 0 of a page written, of others not")                                \
    X(io_before_mark_ready, "record 0 durable, the store not marked READY")                        \
    X(io_after_mark_ready, "the store marked READY, no weights announced")                         \
    X(io_recovered, "the newest commit found and verified, its weights not loaded")                \
    X(io_drained, "another worker died: no transfer is in flight, that is not acknowledged")       \
    X(io_takeover, "the tables of a dead predecessor taken over, no frame compared")               \
    X(io_takeover_page, "a frame of a dead predecessor compared, others not")                      \
    X(io_load_page, "weights of one page loaded, of others not")                                   \
    X(io_microbatch_published, "a microbatch published")                                           \
    X(io_weights_lent, "a page of WEIGHTS lent")                                                   \
    X(io_state_landed, "a page image read from the store and its header verified, not lent")       \
    X(io_state_lent, "a page image and an empty OUT frame lent")                                   \
    X(io_slot_submitted, "a new version is in WEIGHTS, the write of its slot submitted")           \
    X(io_slots_written, "all slot writes of a step are done, the step is not complete")            \
    X(io_complete, "a step announced complete, its commit not begun")                              \
    X(io_before_flush, "all slot writes of a commit complete, nothing flushed")                    \
    X(io_after_flush, "slots durable, digest table not written")                                   \
    X(io_before_table, "just before the digest table is written")                                  \
    X(io_table_written, "digest table written, not read back")                                     \
    X(io_before_record, "table durable and read back, commit record not written")                  \
    X(io_record_written, "commit record written, not read back")                                   \
    X(io_after_record, "record durable and read back, COMMITTED not announced")                    \
    X(io_committed, "COMMITTED announced")                                                         \
    X(io_skip_read_back,                                                                           \
      "a page of the newest commit read back before a skipped step is committed")                  \
    X(io_export_page, "one page of an export written, others not")                                 \
    X(io_export_before_rename, "an export whole, not in its place")                                \
    X(io_exported, "an export in its place, not announced")                                        \
    X(gpu_microbatch_taken, "a microbatch copied to the device, its frame not given back")         \
    X(gpu_weights_taken, "a page of weights copied to the device, its frame not given back")       \
    X(gpu_weights_returned, "a frame of weights given back")                                       \
    X(gpu_mid_forward, "between two layers of the forward pass")                                   \
    X(gpu_forward_done, "forward pass done, not announced")                                        \
    X(gpu_mid_backward, "between two layers of the backward pass")                                 \
    X(gpu_gradient_published, "a page of gradient published, its owner not woken")                 \
    X(gpu_backward_done, "all gradients published, backward pass not announced")                   \
    X(gpu_mid_evaluation, "between two layers of an evaluation")                                   \
    X(gpu_evaluated, "an evaluation done, not announced")                                          \
    X(gpu_mid_generation, "between two layers of a generation")                                    \
    X(gpu_generated, "a generation done, not announced")                                           \
    X(opt_gradient_taken, "a page of gradient taken, its norm not written")                        \
    X(opt_norm_written, "the norm entry of one page written")                                      \
    X(opt_after_norm, "the norm entries of this worker written, no apply yet")                     \
    X(opt_state_taken, "a page image taken, not updated")                                          \
    X(opt_image_sealed, "a page updated and sealed, not published")                                \
    X(opt_gradient_returned, "a frame of gradient given back, its page not written back")          \
    X(opt_written_back, "the new version published, io_worker not woken")                          \
    X(opt_mid_apply, "one page of the step updated, others not")                                   \
    X(opt_skip, "a step skipped, one frame of gradient given back")                                \
    X(launcher_config_before_rename, "config.toml written aside, not in its place")                \
    X(launcher_segment_created, "the segment exists, no worker")                                   \
    X(launcher_child_started, "one worker started, others not")                                    \
    X(launcher_step_begun, "a step begun")                                                         \
    X(launcher_before_apply, "a step decided, STEP_APPLY not ordered")                             \
    X(launcher_line_written, "the line of a step in metrics.jsonl, not durable")                   \
    X(launcher_before_commit, "the step is complete, its commit not asked for")                    \
    X(launcher_commit_ordered, "the commit of a step asked for")                                   \
    X(launcher_after_commit, "COMMITTED seen, not told")                                           \
    X(launcher_evaluation_ordered, "an evaluation asked for")                                      \
    X(launcher_export_ordered, "an export asked for")                                              \
    X(launcher_before_restart, "all others have stopped, the dead worker's successor not started") \
    X(launcher_before_release, "the successor is READY, nobody was told to go on")                 \
    X(launcher_restarting_all, "all workers ended and reaped, none started again")

#define X(name, sentence) FAULT_##name,
enum fault { FAULT_POINTS(X) FAULT_COUNT };
#undef X

#define FAULT_ACTIONS(X)                                                                           \
    X(kill, "SIGKILL")                                                                             \
    X(stop, "SIGSTOP, as a frozen process")                                                        \
    X(segv, "SIGSEGV with its default action")                                                     \
    X(abort, "abort()")                                                                            \
    X(exit0, "_exit(0): a clean status where none is due")                                         \
    X(check, "a CHECK that fails: last words and abort()")                                         \
    X(hang, "sleeps for ever, alive and without a heartbeat")                                      \
    X(scribble, "random bytes into its own frames or rings, then SIGKILL; MTLAUNCH_FAULT_SEED")

#define X(name, sentence) FAULT_ACTION_##name,
enum fault_action { FAULT_ACTIONS(X) FAULT_ACTION_COUNT };
#undef X

enum { FAULT_PROCESS_BYTES = 32, FAULT_POOLS_MAX = 512 };

struct fault_spec {
    enum fault fault;
    enum fault_action action;
    uint64_t nth;                      /* acts at this arrival, counted from 1 */
    char process[FAULT_PROCESS_BYTES]; /* "opt_worker.1"; "": any that passes the point */
};

/* Parses "name[@process]:action[:nth]". 0, or ERROR_USER naming what is unknown and what there is.
 */
int fault_parse(const char *text, struct fault_spec *spec);

/* Arms from MTLAUNCH_FAULT, MTLAUNCH_FAULT_ONCE and MTLAUNCH_FAULT_SEED, if this process is meant.
 * Called once at process start. 0 (also if unset), or ERROR_USER. */
int fault_arm_from_environment(const char *process);

void fault_arm(const struct fault_spec *spec);
void fault_disarm(void); /* forgets the pools too */

/* `frames` x `stride` bytes that this process may write at any time: what `scribble` destroys. At
 * most FAULT_POOLS_MAX are kept. */
void fault_offer_pool(void *base, uint64_t stride, uint64_t frames);

const char *fault_name(enum fault fault);
const char *fault_action_name(enum fault_action action);

/* FAULT_COUNT when not armed: one word to test, in fault_point() only. */
extern enum fault fault_armed;

void fault_arrived(void);

static inline void fault_point(enum fault fault)
{
    if (__builtin_expect(fault_armed == fault, 0))
        fault_arrived();
}

#endif
