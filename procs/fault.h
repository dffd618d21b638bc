/*
 * Fault points: named places where a test makes this process die, stop or hang.
 *
 *     MTLAUNCH_FAULT="io_before_record:kill"       at the first arrival, SIGKILL
 *     MTLAUNCH_FAULT="opt_mid_apply:stop:3"        at the third arrival, SIGSTOP
 *
 * A process that is started again arms its fault again. With MTLAUNCH_FAULT_ONCE=<path> the fault
 * acts only if that file does not exist and can be created: once in all processes and starts that
 * share it.
 *
 * They are in every build, so that what is tested is what is shipped. Not armed, a fault point is
 * one load and one branch. The name says which role passes it and what has or has not happened by
 * then.
 */
#ifndef PROCS_FAULT_H
#define PROCS_FAULT_H

#include <stdint.h>

#define FAULT_POINTS(X)                                                                            \
    X(io_before_flush, "all slot writes of a commit complete, nothing flushed")                    \
    X(io_after_flush, "slots durable, digest table not written")                                   \
    X(io_before_table, "just before the digest table is written")                                  \
    X(io_before_record, "table durable, commit record not written")                                \
    X(io_after_record, "record durable, COMMITTED not announced")                                  \
    X(gpu_mid_forward, "between two layers of the forward pass")                                   \
    X(gpu_mid_backward, "between two layers of the backward pass")                                 \
    X(opt_mid_apply, "one page of the step updated, others not")                                   \
    X(opt_after_norm, "the norm entries of this worker written, no apply yet")                     \
    X(launcher_before_commit, "the step is complete, its commit not asked for")                    \
    X(launcher_before_restart, "all others have stopped, the dead worker's successor not started")

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
    X(hang, "sleeps for ever, alive and without a heartbeat")

#define X(name, sentence) FAULT_ACTION_##name,
enum fault_action { FAULT_ACTIONS(X) FAULT_ACTION_COUNT };
#undef X

struct fault_spec {
    enum fault fault;
    enum fault_action action;
    uint64_t nth; /* acts at this arrival, counted from 1 */
};

/* Parses "name:action[:nth]". 0, or ERROR_USER naming what is unknown and what there is. */
int fault_parse(const char *text, struct fault_spec *spec);

/* Arms from MTLAUNCH_FAULT and MTLAUNCH_FAULT_ONCE. Called once at process start. 0 (also if
 * unset), or ERROR_USER. */
int fault_arm_from_environment(void);

void fault_arm(const struct fault_spec *spec);
void fault_disarm(void);

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
