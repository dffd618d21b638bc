/*
 * The lifeline: a pipe that ends with the launcher, however it dies.
 *
 * The launcher holds the write end and never writes; every worker has the read end as its standard
 * input, which it needs for nothing else. When the launcher is gone, the kernel hangs the pipe up.
 * The first line of defence is the kernel's own (PR_SET_PDEATHSIG, set between fork and exec); this
 * one still works where that was reset, as by programs with file capabilities.
 */
#ifndef PROCS_LIFELINE_H
#define PROCS_LIFELINE_H

/* Launcher: makes the pipe, once; it stays open until this process ends. 0, or ERROR_FAILED. */
int lifeline_open(void);

/* Between fork and exec, in the child: ties it to the process `parent`. -1 when that is gone
 * already, or the kernel refuses. Calls only what is safe there. */
int lifeline_tie(int parent);

/* Worker: 1 when the launcher is gone. */
int lifeline_is_cut(void);

#endif
