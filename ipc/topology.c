#include "ipc/topology.h"

const struct region_row topology_regions[REGION_COUNT] = {
#define X(name, launcher, io, gpu, opt, per, text) {#name, {launcher, io, gpu, opt}, per, text},
    REGION_LIST(X)
#undef X
};

const struct ring_row topology_rings[RING_COUNT] = {
#define X(name, pool, from, to, per, text) {#name, REGION_##pool, from, to, per, text},
    RING_LIST(X)
#undef X
};

const char *topology_role_name(enum role role)
{
    static const char *const names[ROLE_COUNT] = {"launcher", "io_worker", "gpu_worker",
                                                  "opt_worker"};
    return names[role];
}
