/* What the machine has: cores, NUMA nodes, memory that the run may use. */
#ifndef LAUNCHER_MACHINE_H
#define LAUNCHER_MACHINE_H

#include <stdint.h>

/* Cores this process may run on (its affinity mask). */
uint32_t machine_cores(void);

/* NUMA nodes that have both a core of ours and memory; at least 1. */
uint32_t machine_numa_nodes(void);

/* 80 % of what is left: the smaller of MemAvailable and the room under every cgroup limit (v1 or
 * v2). */
uint64_t machine_ram_budget(void);

#endif
