/* Placeholder for the first runs. */
#include "tests/sim/sim.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum mutant mutant_now;

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, n = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    sim.trace = argc > 3;
    sim_core_open();
    sim_disk_open();
    sim_stand_configure(first / 256);
    int trace = sim.trace;
    sim.trace = trace && n == 0;
    if (sim_run_golden(1) < 0) {
        printf("golden: %s\n", sim.violation);
        return 1;
    }
    printf("golden: %llu steps, pages %llu, ticks %llu, yields %llu operations %llu\n", (unsigned long long)config.steps, (unsigned long long)sim_layout.n_pages,
           (unsigned long long)golden.ticks, (unsigned long long)golden.yields, (unsigned long long)golden.operations);
    sim.trace = trace;
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    uint64_t bad = 0, done = 0, ticks = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct sim_result r;
        sim_run_random(first + i, &r);
        done += (uint64_t)r.done;
        ticks += r.ticks;
        if (r.violation && bad++ < 10)
            printf("seed %llu: %s\n", (unsigned long long)(first + i), r.violation);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    double s = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
    printf("%llu schedules, %llu done, %llu bad, %.0f per second, %.0f ticks\n", (unsigned long long)n, (unsigned long long)done, (unsigned long long)bad, (double)n / s, (double)ticks / (double)n);
    return 0;
}
