/*
 * A directory in /tmp for the token cache of one command. Its lock (flock on the directory) says
 * that the command lives; what a killed one left is removed by the next that needs one.
 */
#ifndef LAUNCHER_SCRATCH_H
#define LAUNCHER_SCRATCH_H

enum { SCRATCH_PATH_BYTES = 64 };

struct scratch {
    char path[SCRATCH_PATH_BYTES]; /* "": there is none */
    int fd;
};

/* 0, or ERROR_FAILED. */
int scratch_make(struct scratch *scratch);
void scratch_remove(struct scratch *scratch);

#endif
