/*
 * Workers that outlived their launcher: stopped, frozen or stuck in the kernel when it died. They
 * may hold the store's files and write into them, so the next start ends them before anything else.
 *
 * How they are found: every worker is started with MTLAUNCH_WORKER=<run id>:<start time of its
 * launcher> in its environment, which the kernel keeps beside the process and shows in /proc. A
 * list in a file would have to be written before the process has a number, could be torn, and would
 * be copied with the run directory; this one exists exactly as long as the process does. Nothing of
 * an earlier boot can be found by it.
 *
 * An orphan is a process of ours, named like a worker, with this run's id, whose parent is not the
 * launcher that started it (another start time: it was handed to init or a subreaper). A live run
 * is never touched, not even that of a copied run directory with the same id: its workers have
 * their launcher. The kill goes through a pidfd, opened before all that is checked again, so that a
 * reused process id is never hit.
 */
#ifndef LAUNCHER_ORPHANS_H
#define LAUNCHER_ORPHANS_H

#include "launcher/launcher.h"

/* From here on, children of this process are workers of this run. */
int orphans_mark(const uint8_t id[RUN_ID_BYTES]);

/* Ends the orphans of this run, waits until they are gone, and says so on stderr. How many, or
 * ERROR_BUSY naming one that cannot be killed. Needs the run lock. */
int orphans_end(const uint8_t id[RUN_ID_BYTES]);

#endif
