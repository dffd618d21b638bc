/*
 * What a shell or a service manager lets this process and its workers have (setrlimit(2)). Too
 * little of it would end inside a library: libzmq aborts without descriptors, OpenBLAS tries for
 * ever to map a buffer.
 */
#ifndef LAUNCHER_LIMITS_H
#define LAUNCHER_LIMITS_H

#include "ipc/plan.h"

/* Raises the soft limit of open files to the hard one. ERROR_FIT: fewer than any command needs. */
int limits_open(void);

/* Whether a run of this plan may have what it needs of files and address space. ERROR_FIT, with
 * both numbers. */
int limits_check(const struct plan *plan);

#endif
