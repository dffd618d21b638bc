/*
 * Mutants: each safety mechanism can be switched off, in the simulator only (tests/sim), to show
 * that a test notices. In the product mutant() is a constant 0 and the compiler drops what it
 * guards.
 *
 *     if (!mutant(MUTANT_no_fence))
 *         rc = file_lock(store, &file);
 */
#ifndef PROCS_MUTANT_H
#define PROCS_MUTANT_H

#define MUTANTS(X)                                                                                 \
    X(no_flush, "the slots are not flushed before the table is written")                           \
    X(flush_one_directory, "only the first directory's slots are flushed")

#define X(name, sentence) MUTANT_##name,
enum mutant { MUTANT_none, MUTANTS(X) MUTANT_COUNT };
#undef X

#ifdef MTLAUNCH_SIM
extern enum mutant mutant_now;
#define mutant(which) (mutant_now == (which))
#else
#define mutant(which) 0
#endif

#endif
