/*
 * What people see: one line per step (a bar on a terminal, plain lines elsewhere), what start-up
 * does, validation loss, samples, and the story of a death.
 */
#ifndef LAUNCHER_PROGRESS_H
#define LAUNCHER_PROGRESS_H

#include "launcher/launcher.h"

struct progress_step {
    uint64_t step, steps;
    double loss, norm, learning_rate, tokens_per_s, eta_s;
    uint64_t ram_bytes, store_bytes, written_bytes; /* the last: to the store, for this step */
    int skipped;
};

struct progress;

/* `mode`: log.progress; AUTO is a bar where stderr is a terminal, else plain lines. */
int progress_open(struct progress **progress, enum config_log_progress mode, uint64_t interval);
void progress_close(struct progress *progress);

void progress_step(struct progress *progress, const struct progress_step *step);

/* A worker is busy before READY: what with, how far, how fast, how long still. */
void progress_startup(struct progress *progress, const struct worker_control *control);

/* The same of what is not a worker: bytes done of all. */
void progress_activity(struct progress *progress, enum worker_activity activity, uint64_t done,
                       uint64_t total);

/* A line of its own, whatever the mode (but "none" shows only warnings and errors). */
void progress_say(struct progress *progress, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void progress_warn(struct progress *progress, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
