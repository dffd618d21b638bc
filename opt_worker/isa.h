/*
 * Which instruction set the numeric leaves of this process run on.
 *
 * Every leaf (adamw.h, norm.h) exists three times and gives the same bits each time, so this is a
 * question of speed only. The best one the CPU has is used; tests and benchmarks override it.
 * Scalar means one element at a time, not an old CPU: FMA is an instruction here, never a library
 * call, so the least CPU is x86-64-v3 (AVX2 + FMA, 2013 and later).
 */
#ifndef OPT_WORKER_ISA_H
#define OPT_WORKER_ISA_H

#define ISAS(X)                                                                                    \
    X(ISA_SCALAR, "scalar")                                                                        \
    X(ISA_AVX2, "avx2")                                                                            \
    X(ISA_AVX512, "avx512")

#define X(id, name) id,
enum isa { ISAS(X) ISA_COUNT };
#undef X

/* Called once at worker start. 0, or ERROR_FIT with what the CPU lacks. */
int isa_check(void);

/* 1 if this CPU and operating system run `isa`, else 0. */
int isa_supported(enum isa isa);

/* The one in use: the best supported, or the one given to isa_use(). */
enum isa isa_now(void);

/* Overrides the choice for this process; `isa` is supported (CHECK). For tests and benchmarks. */
void isa_use(enum isa isa);

const char *isa_name(enum isa isa);

/*
 * The floating-point mode of DESIGN 8: round to nearest, denormal results and inputs are zero
 * (FTZ + DAZ), no traps. Leaves enter it themselves and restore the caller's, so that their bits
 * never depend on which thread called. Returns the mode to give back to isa_mode_leave().
 */
unsigned isa_mode_enter(void);
void isa_mode_leave(unsigned saved);

#endif
