/*
 * The run directory: who may use it, which run it is, what configuration it runs with.
 *
 *     run.lock      held by the living launcher (run_lock.h); one more lies in each offload_dir
 *     run.id        the run's identity, 32 hexadecimal digits; the store carries the same
 *     config.toml   the effective configuration of the newest start
 *     metrics.jsonl, logs/, cache/, export/, and unless offload_dir says otherwise store/
 *
 * Who may look: it is made 0700. One that was there before is set to 0700, and that is said, if it
 * is ours and holds a run or nothing; in a directory with other things in it the mode is left
 * alone. One that others may write to, or that is another user's, is refused: whoever can replace
 * files there can make us write elsewhere. (root may work in anybody's.)
 *
 * Copies: a copied run directory that brings its own store is a run of its own, with the same
 * run.id and the same past, and works beside the original; the two never write one store, since a
 * store inside the run directory was copied with it and one outside is locked by whoever was first.
 */
#ifndef LAUNCHER_RUN_DIR_H
#define LAUNCHER_RUN_DIR_H

#include "launcher/launcher.h"

enum run_dir_mode {
    RUN_DIR_CREATE,    /* to train: made if it is not there; what a killed start left is removed */
    RUN_DIR_EXISTING,  /* for a command: ERROR_USER if it is no run directory */
    RUN_DIR_READ_ONLY, /* the same, and nothing is written, not even an access time */
};

/* Opens and locks. ERROR_BUSY, naming the process, when somebody holds it: nothing was changed
 * then. ERROR_USER when it is not there, not a run directory, or not safe to work in. */
int run_dir_open(struct run_dir *run, const char *path, enum run_dir_mode mode);
void run_dir_close(struct run_dir *run);

/* Locks every offload_dir, `path`/store without one; before any worker starts. Only to train are
 * absent ones made. ERROR_BUSY names who has it. */
int run_dir_lock_stores(struct run_dir *run, const struct config *config, enum run_dir_mode mode);

/* Compares the configuration with the one the run was started with (announcing changes on stderr),
 * then puts it into the directory. */
int run_dir_adopt_config(struct run_dir *run, const struct config *config);

/* Reads the configuration of an existing run. Its output_dir is `path`, wherever the run was when
 * that was written: a copy has its own store, and a moved run is where it is. */
int run_dir_read_config(const char *path, struct config *config);

/* Says in the lock file how to reach this launcher, and reads it. `endpoint`: PLAN_ENDPOINT_BYTES,
 * `token`: PLAN_TOKEN_BYTES. Reading: ERROR_USER when no run is alive there, or it is another
 * user's. */
int run_dir_write_contact(struct run_dir *run, const char *endpoint, const char *token);
int run_dir_read_contact(const char *path, char *endpoint, char *token);

/* Removes what this process made of the run: files, and the directory if it was not there before;
 * of a run that was there, gives it its former configuration back. The current error stays. */
void run_dir_undo(struct run_dir *run);

/* Deletes a directory tree. */
int run_dir_remove_tree(const char *path);

#endif
