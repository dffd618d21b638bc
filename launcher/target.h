/*
 * What a command works on: a run directory (locked, its newest commit) or a Hugging Face folder.
 */
#ifndef LAUNCHER_TARGET_H
#define LAUNCHER_TARGET_H

#include "launcher/launcher.h"
#include "launcher/scratch.h"
#include "launcher/supervisor.h"

struct target {
    int is_run;
    struct scratch scratch; /* token cache of this command */
};

/* Finds out what `path` is, reads configuration and model into `l`. `data`: a file to read in place
 * of the run's data, or NULL. ERROR_BUSY when the run is alive. */
int target_open(struct target *target, struct launcher *l, const char *path, const char *data);

/* Runs the job, quietly. */
int target_run(struct target *target, struct launcher *l, struct supervisor_job *job);

/* Releases everything, tells the error if rc < 0, returns the exit status. */
int target_close(struct target *target, struct launcher *l, int rc);

#endif
