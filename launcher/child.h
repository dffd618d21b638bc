/*
 * One worker process: started, watched by pidfd, its death told as a story.
 */
#ifndef LAUNCHER_CHILD_H
#define LAUNCHER_CHILD_H

#include <stdint.h>
#include <sys/types.h>

#include "ipc/topology.h"

enum child_state {
    CHILD_NONE,    /* not started; child_start() leads to RUNNING */
    CHILD_RUNNING, /* the process exists as far as we know; child_poll() leads to DEAD */
    CHILD_DEAD,    /* reaped; `status` is final */
};

struct child {
    enum role role;
    uint32_t index;
    uint32_t incarnation; /* the generation in which it was started */
    enum child_state state;
    pid_t pid;
    int pid_fd;
    int status;         /* as waitpid() gives it */
    uint64_t heartbeat; /* newest seen */
    uint64_t alive_ns;  /* when it last changed; later where the launcher itself was paused */
    uint64_t asleep_ns; /* when it was last seen asleep, likewise; 0 = never */
    uint64_t paused_ns; /* pauses of the launcher since this worker was started */
    uint64_t abort_ns, kill_ns; /* when the watchdog sent SIGABRT, SIGKILL; 0 = not */
    char verdict[768];          /* why */
};

/* Starts the worker's program with the segment's descriptor. */
int child_start(struct child *child, int segment_fd);

/* Reaps without waiting: 1 if it is dead (now or before). */
int child_poll(struct child *child);

/* Looks only: 1 if it has died, reaped or not. */
int child_has_ended(const struct child *child);

/* Sends a signal through the pidfd; a dead child is fine. */
void child_signal(struct child *child, int signal);

/* Waits up to `timeout_ms` for its end; 1 if dead. */
int child_wait(struct child *child, int timeout_ms);

/* "killed by signal 9 (Killed)", "exited with status 3". */
const char *child_cause(const struct child *child, char *text, uint64_t bytes);

#endif
