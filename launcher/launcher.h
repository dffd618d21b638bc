/*
 * What the launcher holds while a run lives, shared by its rooms:
 *
 *     tokenizing.c   text to token files, before anything else
 *     run_dir.c      the run directory: lock, identity, effective configuration
 *     plan_build.c   configuration + model + machine -> the plan
 *     child.c        one worker process: start, death, cause
 *     session.c      one generation: segment, endpoint, children; start and end of all of it
 *     supervisor.c   the event loop: signals, deaths, limits; T2 and T4
 *     restart.c      T1: one worker restarted, the others kept
 *     watchdog.c     deadlines per operation and per I/O request
 *     spike.c        losses and norms far above their running median
 *     findings.c     what recomputation found out about the hardware
 *     coordinator.c  the step protocol over the control pages
 *     metrics.c      metrics.jsonl
 *     progress.c     what people see
 *     command_*.c    the commands
 *
 * The launcher never touches page payload.
 */
#ifndef LAUNCHER_LAUNCHER_H
#define LAUNCHER_LAUNCHER_H

#include "ipc/control.h"
#include "ipc/endpoint.h"
#include "ipc/segment.h"
#include "launcher/child.h"
#include "launcher/config.h"
#include "launcher/schedule.h"
#include "launcher/spike.h"
#include "model/layout.h"

#include <stdio.h>

struct metrics;
struct progress;

enum {
    LAUNCHER_CHILDREN_MAX = OPT_WORKERS_MAX + 2,
    RUN_ID_BYTES = 16,
    LAUNCHER_PATH_BYTES = 4096,
    RUN_STORES_MAX = 16, /* as many offload_dirs as a store takes */
};

/* The lock in one offload_dir. */
struct store_lock {
    int fd;
    int created;     /* the lock file, by this process, */
    uint32_t levels; /* and so many directories of its path: they go if the start fails */
    char directory[LAUNCHER_PATH_BYTES];
};

struct run_dir {
    char path[LAUNCHER_PATH_BYTES];
    uint8_t id[RUN_ID_BYTES];
    int lock_fd;
    int read_only;   /* opened to look: nothing is written, the locks are shared */
    uint32_t levels; /* directories of the path made by this process; or only, */
    int fresh;       /* the run in it: both go again if the start fails on the user's account */
    uint32_t mode_before; /* of a directory that was tightened; 0 = it was not */
    uint32_t before;      /* bit i: run_dir.c's entry i was there before this process */
    struct store_lock stores[RUN_STORES_MAX];
    uint32_t n_stores;
};

/* One generation: one life of the shared segment and of the workers on it. */
struct session {
    struct plan *plan; /* built in private memory, `plan_capacity` bytes; copied into the segment */
    struct segment segment;
    struct endpoint *endpoint;
    char socket_dir[64];
    struct child children[LAUNCHER_CHILDREN_MAX];
    uint32_t n_children;
    struct launcher_control *orders;
    const struct worker_control *io, *gpu, *opt[OPT_WORKERS_MAX];
    uint64_t findings_told[OPT_WORKERS_MAX]; /* of each opt_worker's */
};

/* Where the step protocol is. Everything else is in the control pages. */
struct coordinator {
    uint64_t first;      /* the step after the newest commit at the start of the session */
    uint64_t steps;      /* the run's length */
    uint64_t stop_after; /* 0 = off */
    /* What io_worker says is complete, committed, exported: as this turn found it, and believed. */
    uint64_t complete, committed, written;
    uint64_t t;         /* AdamW updates decided so far */
    uint64_t begun;     /* newest step that may run; at the start of a session the committed one */
    uint64_t announced; /* newest commit that was shown */
    uint64_t exported;  /* newest export ordered */
    int paused;         /* step lines wait for room on the disk */
    uint64_t given_up;  /* newest export that is known to have failed */
    uint64_t evaluated; /* newest step evaluated by this launcher */
    int evaluating;     /* 0 no, 1 validation loss, 2 samples, 3 they are decoded */
    uint64_t step_begin_ns; /* when the step before was complete */
    double step_s, mean_step_s;
    uint64_t wait_base[LAUNCHER_CHILDREN_MAX][RING_COUNT]; /* wait_ns at the last step line */
    uint64_t read_base, written_base; /* io_worker's bytes at the last step line */
    uint64_t step_written;            /* bytes written for the newest line: its slots, a commit */
    uint64_t lined;                   /* newest step whose line is in metrics.jsonl */
    struct spike_window window;
    struct spike_redo redo;
    struct schedule schedule;
    double *page_sums, *layer_sums;
};

enum restart_phase { RESTART_NONE, RESTART_STOPPING, RESTART_STARTING }; /* restart.h */

/* A restart of one worker under way. */
struct restart {
    enum restart_phase phase;
    int redo; /* nobody died: the step is computed once more */
    uint64_t begun_ns, stopped_ns;
};

/* What the plan names as data in place of the configuration's files: token files where text was
 * tokenized (tokenizing.h), the same paths elsewhere. Empty: the configuration's. */
struct tokenized {
    struct config_strings train, validation;
};

struct launcher {
    struct config config;
    struct tokenized tokenized;
    struct model_layout layout;
    struct run_dir run;
    struct session session;
    struct coordinator coordinator;
    struct metrics *metrics;
    struct progress *progress;
    const struct prompts *sample_prompts; /* eval.sample_prompts as ids */
    struct samples *samples;              /* of the evaluation under way, or NULL */
    int signal_fd;
    int finished;       /* the last step of the run is committed */
    int stop_requested; /* `mtlaunch stop`: finish the step */
    uint64_t stop_step; /* ... this one, as was answered */
    char stop_peer[MESSAGE_PEER_BYTES];
    struct restart restart;
    uint64_t watched_ns;      /* the watchdog's last look */
    uint64_t moved, moved_ns; /* sum of the counters of the step protocol; when it last changed */
    uint32_t generation;
};

#endif
