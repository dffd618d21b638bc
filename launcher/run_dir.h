/*
 * The run directory: who may use it, which run it is, what configuration it runs with.
 *
 *     run.lock      flock held by the living launcher; its text says how `mtlaunch stop` reaches it
 *     run.id        the run's identity, 32 hexadecimal digits; the store carries the same
 *     config.toml   the effective configuration of the newest start
 *     metrics.jsonl, logs/, cache/, export/, and unless offload_dir says otherwise store/
 */
#ifndef LAUNCHER_RUN_DIR_H
#define LAUNCHER_RUN_DIR_H

#include "launcher/launcher.h"

/* Opens (creating it when `create`) and locks. ERROR_BUSY when a live process holds it: nothing was
 * changed then. ERROR_USER when it is absent and not to be created, or is not a run directory. */
enum run_dir_mode { RUN_DIR_CREATE, RUN_DIR_EXISTING };
int run_dir_open(struct run_dir *run, const char *path, enum run_dir_mode mode);
void run_dir_close(struct run_dir *run);

/* Compares the configuration with the one the run was started with (announcing changes on stderr),
 * then puts it into the directory. */
int run_dir_adopt_config(struct run_dir *run, const struct config *config);

/* Reads the configuration of an existing run. */
int run_dir_read_config(const char *path, struct config *config);

/* Says in the lock file how to reach this launcher, and reads it. `endpoint`: PLAN_ENDPOINT_BYTES,
 * `token`: PLAN_TOKEN_BYTES, `generation`. Reading: ERROR_USER when no run is alive there. */
int run_dir_write_contact(struct run_dir *run, const char *endpoint, const char *token);
int run_dir_read_contact(const char *path, char *endpoint, char *token);

/* Removes what this process made of the run: files, and the directory if it was not there before;
 * of a run that was there, gives it its former configuration back. The current error stays. */
void run_dir_undo(struct run_dir *run);

/* Deletes a directory tree. */
int run_dir_remove_tree(const char *path);

#endif
