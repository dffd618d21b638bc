/*
 * Sampled recomputation: some blocks of each page are computed a second time, on another core.
 *
 * A checksum proves that bytes are those that were computed; nothing proves that they were computed
 * right. A core that now and then gives a wrong product leaves no trace but a worse model. So a
 * part of the 4096-element blocks of every page (optimizer.recompute) is computed once more, before
 * the page is sealed, by a thread bound to another core than the one that made the update, and
 * compared with it bit for bit: weights, residual, both moments.
 *
 *     equal       nothing more
 *     different   a third computation, on a third core where there is one and with scalar
 *                 instructions (the same bits by contract, other circuits): what came twice is
 *                 right. It goes to OUT, and the launcher tells page, block, element and cores.
 *     no two alike   an error that names the hardware: the worker leaves, nothing of it counts
 *
 * Which blocks is drawn by counter-based random numbers from (seed, step, page, block), so a step
 * that is done again recomputes the same ones. No bit of the run depends on any of it.
 *
 * The thread sleeps unless a page is being compared, and the update waits for it. Computing and
 * comparing a block takes about two updates of it. Nothing is allocated after opening.
 *
 *     recompute_bind(r);                    // the update below happens on one core
 *     adamw_update_f32(&scalars, &page);
 *     rc = recompute_compare(r, &done);     // 0, or negative: error_set
 */
#ifndef OPT_WORKER_RECOMPUTE_H
#define OPT_WORKER_RECOMPUTE_H

#include "ipc/control.h"
#include "opt_worker/adamw.h"

struct recompute;

struct recompute_options {
    uint64_t seed;
    uint64_t page_elements;
    double fraction;                /* 0: off */
    struct worker_control *control; /* where findings are told; NULL: nowhere (tests) */
};

/* One page as it was just updated: one of the two, its outputs not sealed yet. */
struct recompute_page {
    uint64_t step, page;
    const struct adamw_scalars *scalars;
    const struct adamw_page_f32 *f32;
    const struct adamw_page_split *split;
};

/* Starts the thread, unless fraction is 0. 0, or ERROR_FAILED. Also arms MTLAUNCH_FLIP_OUT. */
int recompute_open(struct recompute **recompute, const struct recompute_options *options);
/* NULL is fine. */
void recompute_close(struct recompute *recompute);

/* Before an update: keeps the calling thread on the core where it runs, so that it can be named and
 * avoided. recompute_compare() ends that. Nothing where recomputation is off. */
void recompute_bind(struct recompute *recompute);

/* Compares the chosen blocks of a page, and repairs OUT where it alone was wrong. 0, or
 * ERROR_FAILED: no two of three computations are alike, or OUT does not keep what is written. */
int recompute_compare(struct recompute *recompute, const struct recompute_page *page);

/* Blocks compared so far, and those that differed. */
uint64_t recompute_blocks(const struct recompute *recompute);
uint64_t recompute_differences(const struct recompute *recompute);

/* The choice, pure: fills `chosen` (n_blocks) in ascending order with the blocks of `page` that are
 * recomputed in `step`; returns how many. Each is drawn with probability options->fraction. */
uint64_t recompute_choose(const struct recompute_options *options, uint64_t step, uint64_t page,
                          uint64_t n_blocks, uint32_t *chosen);

#endif
