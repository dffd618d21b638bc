/*
 * A cgroup of its own for the workers of a run, below the one that the launcher is in:
 * mtlaunch-<first 8 digits of the run id>-<launcher's pid>. Limits of the groups above hold for it;
 * it sets none. It shows a run's processes and memory in one place, and its kill file ends whatever
 * is left in it at the end.
 *
 * cgroup v2 where it is mounted and writable, else the pids hierarchy of v1 (not memory: there a
 * group may escape the limits above it), else none: it is a convenience, and nothing depends on it.
 */
#ifndef LAUNCHER_CGROUP_H
#define LAUNCHER_CGROUP_H

#include "launcher/launcher.h"

/* Makes it, and removes those that dead launchers left. Says in the log what came of it. */
void cgroup_open(const uint8_t id[RUN_ID_BYTES]);

/* Between fork and exec, in the child: moves it there, if there is one. */
void cgroup_enter(void);

/* Kills what is left in it and removes it. */
void cgroup_close(void);

#endif
