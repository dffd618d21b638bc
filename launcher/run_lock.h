/*
 * `run.lock`: one in the run directory and one in each offload_dir, so that two launchers never
 * work on one run and two runs, or two copies of one run, never write one store.
 *
 * The lock is flock() on the file, so it goes with its holder however that dies, and a lock file
 * that lies around means nothing. Its text is for those who find it taken:
 *
 *     line 1, 2   socket and token: how `mtlaunch stop` reaches the holder (run directory only)
 *     line 3      process id of the holder
 *     line 4      its run directory
 *
 * A holder that was killed leaves its text; it is believed only while somebody holds the lock.
 * The file may be unlinked by whoever holds it, so a lock counts only if the file that was locked
 * is still the one that the path names.
 */
#ifndef LAUNCHER_RUN_LOCK_H
#define LAUNCHER_RUN_LOCK_H

#include "ipc/plan.h"

enum { RUN_LOCK_TEXT_BYTES = 8192 };

struct run_lock_text {
    char endpoint[PLAN_ENDPOINT_BYTES];
    char token[PLAN_TOKEN_BYTES];
    int pid;
    char path[4096]; /* of the holder's run directory */
};

enum run_lock_how {
    RUN_LOCK_EXCLUSIVE, /* creates the file where there is none: *created */
    RUN_LOCK_SHARED,    /* of a command that only reads: nothing is written or created; without a
                           file there is nobody, and *fd is -1 */
};

/* Locks `directory`/run.lock. `what`, "run" or "store", is for the message. ERROR_BUSY names who
 * holds it; nothing was changed then. The descriptor is the caller's to close. */
int run_lock_take(const char *directory, const char *what, enum run_lock_how how, int *fd,
                  int *created);

/* Says who holds it: replaces the text. On a full disk there is none, which costs `mtlaunch stop`
 * and a name in a message, and no start. */
int run_lock_write(int fd, const struct run_lock_text *text);

/* Takes the text away; the lock goes with the descriptor. */
void run_lock_clear(int fd);

/* The text of a lock file: what is there, which may be nothing or stale. -errno when the file
 * cannot be opened. */
int run_lock_read(const char *directory, struct run_lock_text *text);

/* 1 if somebody holds it now. */
int run_lock_is_held(const char *directory);

#endif
