/*
 * The simulator: the product's own control code, all processes of a run in one, under virtual time.
 *
 *     sim_core.c    coroutines, scheduler, clock, random numbers, memory of a process
 *     sim_disk.c    a file system with sectors that are pending until flushed; locks; asynchronous
 * I/O sim_process.c descriptors, fork, death, signals, sleeping sim_ipc.c     control messages that
 * are lost, doubled, late; rings under watch sim_stand.c   stand-ins for what is not control:
 * device, data, import, export, plan sim_run.c     one schedule: faults drawn from a seed, power
 * cuts, the oracle main.c        many schedules: batches, the index sweep, mutants, the ledger
 *
 * The Makefile compiles the product's sources a second time (tests/sim/scale.sed makes some sizes
 * smaller) and renames what they call outside of C (tests/sim/edges.syms): `open` becomes
 * `sim_open`. So the scheduler may switch processes, kill one, or cut the power at each of those
 * calls, at ring operations, at fault points and wherever a worker checks or waits.
 *
 * Everything a schedule does follows from its seed.
 */
#ifndef TESTS_SIM_SIM_H
#define TESTS_SIM_SIM_H

#include "io_worker/commit.h"
#include "ipc/endpoint.h"
#include "ipc/plan.h"
#include "ipc/ring.h"
#include "launcher/launcher.h"
#include "launcher/metrics.h"
#include "model/layout.h"
#include "procs/error.h"
#include "procs/mutant.h"

#include <stdarg.h>
#include <stdint.h>

#ifdef MTLAUNCH_SIM /* not so where a linter reads the product's own headers */
_Static_assert(MODEL_BLOCK_ELEMENTS == 32 && (int)PAGE_IMAGE_HEADER_BYTES == 512 &&
                   (int)COMMIT_RECORD_BYTES == 1536 && (int)RING_CURSOR_BYTES == 64 &&
                   (int)OPT_WORKERS_MAX == 4 && (int)LAUNCHER_PATH_BYTES == 256 &&
                   (int)METRICS_FULL_S == 20 && (int)SPIKE_STEPS_MIN == 2,
               "tests/sim/scale.sed no longer finds what it makes smaller");
#endif

enum {
    SIM_PROCESSES_MAX = 24,
    SIM_FDS_MAX = 48,
    SIM_INBOX_MAX = 64,
    SIM_STEPS_MAX = 8,
    SIM_SECTOR_BYTES = 512,
    SIM_PATH_BYTES = 64,
};

/* -- sim_core.c -- */

enum sim_state {
    SIM_FREE,     /* the place is empty */
    SIM_RUNNABLE, /* may be picked */
    SIM_SLEEPING, /* until wake_ns, or what it waits for */
    SIM_ZOMBIE,   /* dead; its parent has not asked yet */
};

enum sim_fd_kind { FD_NONE, FD_FILE, FD_DIRECTORY, FD_SHARED, FD_PID, FD_SIGNAL, FD_EVENT };

struct sim_fd {
    enum sim_fd_kind kind;
    int object; /* FILE: open file; SHARED: segment; PID: pid */
    uint64_t at;
    int flags;
};

struct sim_message {
    struct message m;
    char from[MESSAGE_PEER_BYTES];
};

struct endpoint {
    int in_use, process, is_router;
    char name[MESSAGE_PEER_BYTES], address[PLAN_ENDPOINT_BYTES + 8];
    struct sim_message inbox[SIM_INBOX_MAX];
    unsigned n_inbox;
    uint64_t dropped;
};

struct sim_process {
    enum sim_state state;
    int pid, parent, status;
    enum role role;
    uint32_t index;
    void *stack_pointer;
    unsigned char *stack, *arena;
    uint64_t arena_used, arena_last;
    uint64_t wake_ns, stopped_until_ns; /* stopped: not picked, whatever its state */
    uint64_t doomed_tick;               /* killed then; 0 = not doomed */
    uint64_t stuck_until_ns;            /* until then no signal ends it: a driver, a dead drive */
    int signalled;                      /* SIGTERM waits in its signalfd */
    int sleeps_for_child, sleeps_for_engine; /* what ends the sleep early */
    struct endpoint *sleeps_for_message;
    struct sim_fd fds[SIM_FDS_MAX];
    char error[512];
    enum error_kind error_kind;
    char *panic;
    uint64_t panic_bytes;
    int argc;
    char *argv[4], argv_text[2][16];
    int (*entry)(struct sim_process *self);
    int errno_kept;
};

struct sim {
    uint64_t random, now_ns, tick;
    uint64_t yields;    /* places passed where a switch could have been: the clock of faults */
    uint64_t attention; /* at this place there is one */
    int countdown;      /* places until the next switch, */
    unsigned stretch;   /* so many on average */
    unsigned weight_process, weight_io, weight_message, weight_time;
    int starved; /* this process is picked rarely; -1 none */
    struct sim_process processes[SIM_PROCESSES_MAX];
    int live[SIM_PROCESSES_MAX], n_live; /* those that run or sleep */
    int doomed;                          /* somebody is to be killed soon */
    uint64_t deaths;
    int current; /* index, -1 in the scheduler */
    int next_pid;
    int trace;
    const char *violation; /* the first one; the schedule ends */
    char violation_text[512];
    int over; /* the schedule is at its end */
};
extern struct sim sim;

uint64_t sim_random(void);
uint64_t sim_below(uint64_t n); /* in [0, n) */
int sim_chance(unsigned one_in);

void sim_core_open(void);
void sim_core_reset(uint64_t seed);

struct sim_process *sim_self(void);
struct sim_process *sim_find(int pid);
struct sim_process *sim_spawn(enum role role, uint32_t index, int (*entry)(struct sim_process *));
/* A place where another process may be picked. */
void sim_yield(void);
/* The current process goes to sleep as its fields say; returns when woken. */
void sim_sleep(void);
_Noreturn void sim_die(int status); /* the current process: wait status */
_Noreturn void sim_exit(int status);
_Noreturn void sim_abort(void);
/* Takes a process away at once, wherever it stands: wait status as waitpid() gives it. */
void sim_kill(struct sim_process *p, int status);
void sim_doom(struct sim_process *p, uint64_t ticks); /* killed that much later */
void sim_not_live(int process);
/* One tick: somebody runs, an I/O or a message lands, or time passes. 0 when nothing can happen. */
int sim_tick(void);
int sim_is_private(const void *p);
int sim_is_stuck(const struct sim_process *p);

void sim_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
void sim_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* -- sim_disk.c -- */

enum disk_fault {
    DISK_NONE,
    DISK_EIO,         /* this operation fails */
    DISK_EIO_EVER,    /* and every later one on the same file, until sim_disk_heal() */
    DISK_SHORT,       /* moves a part, says so */
    DISK_EINTR,       /* EINTR or EAGAIN */
    DISK_LOST,        /* a write is acknowledged and never lands */
    DISK_MISDIRECTED, /* a write lands somewhere else in its file */
    DISK_ROT,         /* a bit of what was written flips, after the write */
    DISK_FLUSH_FAILS, /* a flush says EIO, its pages are dropped; the next one says success */
    DISK_CUT_BEFORE,  /* power goes before the operation does anything */
    DISK_CUT_AFTER,   /* power goes when it is done */
    DISK_CUT_TORN,    /* power goes when a part of it has landed */
    DISK_KILL_BEFORE, /* its process dies before, or after, submitting it */
    DISK_KILL_AFTER,
    DISK_FAULT_COUNT,
};
extern const char *const disk_fault_names[DISK_FAULT_COUNT];

struct disk_plan {
    uint64_t operation; /* counted from the start of the schedule */
    enum disk_fault fault;
};

enum { DISK_PLANS_MAX = 8 };

struct disk {
    uint64_t operations; /* transfers and file system calls so far */
    uint64_t transfers;
    struct disk_plan plans[DISK_PLANS_MAX];
    unsigned n_plans;
    uint64_t done[DISK_FAULT_COUNT]; /* faults that really happened */
    int cut;                         /* the power is to be cut at the next tick */
    unsigned in_flight;
    int corrupted;          /* faults that may have damaged what was durable or acknowledged */
    uint64_t full_until_ns; /* files that grow: no room until then; slots have theirs */
    uint64_t full;          /* so often there was none */
};
extern struct disk disk;

void sim_disk_open(void);
void sim_disk_format(void); /* empty */
void sim_disk_keep(void);   /* this is what sim_disk_restore() brings back */
void sim_disk_restore(void);
void sim_disk_heal(void);          /* no more faults; what is damaged stays damaged */
void sim_disk_power_cut(void);     /* all processes are gone already */
int sim_disk_land_one(void);       /* completes a transfer in flight; 0 if there is none */
void sim_disk_orphan(int process); /* its process is dead; what it started goes on */
int sim_disk_readable(int engine);
int sim_disk_exists(const char *path);
const unsigned char *sim_disk_bytes(const char *path, uint64_t *n);
void sim_disk_write_file(const char *path, const void *bytes, uint64_t n); /* durable at once */
int sim_file_close(int file);
int sim_segment_busy(const unsigned char *begin, uint64_t bytes);

/* -- sim_process.c -- */

/* The current process sleeps for that descriptor too. */
void sim_sleep_for(int fd);

int sim_fd_new(enum sim_fd_kind kind, int object);
struct sim_fd *sim_fd_get(int fd);
int sim_fd_readable(struct sim_process *p, int fd);
void sim_process_reset(void);
void sim_process_gone(struct sim_process *p);                              /* closes what it held */
int sim_segment_new(void);                                                 /* a descriptor */
int sim_segment_of(const unsigned char *at, const unsigned char **memory); /* -1: in none */
unsigned char *sim_segment_bytes(int object, uint64_t *bytes);
/* Flips a bit in the newest segment: in a descriptor, or in what only io_worker writes. 1 if it
 * did. */
unsigned sim_scribble_ring(void);
unsigned sim_scribble_of_io(void);
unsigned sim_scribble_of_opt(uint32_t index);
const struct plan *sim_newest_plan(void); /* NULL: no segment lives */

/* -- sim_ipc.c -- */

void sim_ipc_reset(void);
int sim_ipc_deliver(void); /* one message that is on its way; 0 if there is none */
unsigned sim_ipc_on_their_way(void);
void sim_ipc_post(const char *from, const struct message *m); /* to the newest session's launcher */
void sim_ipc_gone(int process);
void sim_frames_reset(void);
void sim_frames_forget(int segment); /* it begins anew */

/* -- sim_stand.c: the configuration of a schedule and what stands in for real work -- */

struct sim_config {
    uint64_t seed;
    uint64_t steps, blocks, experts, expert_size, microbatches, microbatch_frames, prefetch;
    uint32_t opt_workers, directories, slots, bf16, tied, checkpoint_every;
    uint64_t skip_mask; /* bit s: the gradient of step s is not finite */
    uint64_t export_interval, eval_interval, durability;
    uint32_t frame_hashes;
    uint32_t prompts, in_epochs, no_watchdog;
    enum config_training_spike spike;
};
extern struct sim_config config;
extern struct model_layout sim_layout;

void sim_stand_configure(uint64_t seed);
void sim_stand_launcher(struct launcher *l);
uint64_t sim_hash(uint64_t a, uint64_t b);

/* -- sim_run.c -- */

/* What the undisturbed run left, by step. */
struct golden {
    uint8_t state[SIM_STEPS_MAX + 1][16];
    int has_state[SIM_STEPS_MAX + 1];
    uint64_t exported[SIM_STEPS_MAX + 1];  /* hash of the weights of an export; 0 none */
    char evaluated[SIM_STEPS_MAX + 1][32]; /* loss */
    uint64_t ticks, yields, operations, transfers;
};
extern struct golden golden;

struct sim_result {
    uint64_t seed, ticks, sessions, launchers, kills, power_cuts, stops, operations;
    uint64_t requests; /* stops that were asked for */
    uint64_t faults[DISK_FAULT_COUNT];
    uint64_t recoveries[5]; /* by tier: T1 .. T4 at 1 .. 4; 0: a launcher that started again */
    int done;
    const char *violation;
};

/* The undisturbed run of the current configuration; 0, or -1 with a violation. */
int sim_run_golden(uint64_t seed);
void sim_run_random(uint64_t seed, struct sim_result *result);
void sim_run_planned(const struct disk_plan *plans, unsigned n, uint64_t seed, int from_nothing,
                     struct sim_result *result);

/* What a launcher asks of the system and may not get. */
enum sim_refusal {
    REFUSE_NOTHING,
    REFUSE_PLAN,
    REFUSE_SOCKET,
    REFUSE_MEMORY,
    REFUSE_CHILD,
    REFUSALS
};
int sim_refuses(enum sim_refusal what); /* 1: not this time */
int sim_export_fails(uint64_t step);
uint64_t
sim_flip(uint64_t step); /* not 0: the gradient of this computation comes out wrong, in this way */

/* Called from where the product tells the world. */
void sim_on_commit(const struct worker_control *io);
/* The launcher tells of it: io_worker may stop for ever between its fact and the call above. */
void sim_on_announced(uint64_t step);
void sim_on_resume(const struct worker_control *io, int alone);
void sim_on_export(uint64_t step, uint64_t hash);
void sim_on_session(void);
void sim_on_stopping(uint64_t step);             /* the answer to a stop request */
void sim_on_damage(const struct sim_process *p); /* it leaves because shared memory is damaged */

#endif
