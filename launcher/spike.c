#include "launcher/spike.h"

#include "procs/check.h"

double spike_median(const double *values, uint32_t n)
{
    double sorted[SPIKE_WINDOW_STEPS] = {0};
    CHECK(n > 0 && n <= SPIKE_WINDOW_STEPS);
    for (uint32_t i = 0; i < n; i++) { /* insertion: at most 32 */
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > values[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = values[i];
    }
    return n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
}

int spike_found(const struct spike_window *w, double loss, double norm, double factor)
{
    return w->count >= SPIKE_STEPS_MIN && (loss > factor * spike_median(w->loss, w->count) ||
                                           norm > factor * spike_median(w->norm, w->count));
}

enum spike_answer spike_judge(struct spike_redo *r, uint64_t step, uint64_t low, uint64_t high)
{
    if (r->step != step) {
        r->step = step;
        r->computed = 0;
    }
    CHECK(r->computed < SPIKE_COMPUTATIONS_MAX);
    for (uint32_t i = 0; i < r->computed; i++)
        if (r->hash[i].low == low && r->hash[i].high == high)
            return r->computed == 1 ? SPIKE_DATA : SPIKE_HARDWARE;
    r->hash[r->computed].low = low;
    r->hash[r->computed++].high = high;
    return r->computed == SPIKE_COMPUTATIONS_MAX ? SPIKE_LOST : SPIKE_AGAIN;
}
