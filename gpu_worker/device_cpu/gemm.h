/*
 * Matrix products on the compute threads: c = a b + beta c, then an epilogue while c is warm.
 *
 * Each product is cut into a grid of tiles that depends on its shape alone; a tile is one
 * single-threaded BLAS call, and the threads claim tiles. Bits therefore do not depend on the
 * number of threads, while BLAS's own threading changes them. K is never split.
 *
 * BLAS is OpenBLAS, loaded at run time so that its environment can be set first: one thread, and
 * the kernels of the CPU's real instruction set. (Version 0.3.21 takes CPUs newer than itself for a
 * Prescott: 30 instead of 140 GFLOP/s on one Sapphire Rapids core.)
 */
#ifndef GPU_WORKER_DEVICE_CPU_GEMM_H
#define GPU_WORKER_DEVICE_CPU_GEMM_H

#include <stdint.h>

#include "gpu_worker/device_cpu/threads.h"

enum gemm_transpose { GEMM_AS_IS, GEMM_TRANSPOSED };
enum gemm_round { GEMM_KEEP_F32, GEMM_ROUND_BF16 };

/* Row-major. op(a): (m,k), op(b): (k,n), c: (m,n); ld* in elements. */
struct gemm {
    enum gemm_transpose transpose_a, transpose_b;
    uint64_t m, n, k;
    const float *a;
    uint64_t lda;
    const float *b;
    uint64_t ldb;
    float *c;
    uint64_t ldc;
    float beta; /* 0 (c is not read, and may hold anything) or 1 */
    /* epilogue: c = round(c + bias), bias (n) or NULL; then, with a residual (m,n; ld ldc), c =
     * round(residual + c) */
    const float *bias;
    const float *residual;
    enum gemm_round round;
};

/* Loads OpenBLAS once per process. Errors: ERROR_FAILED with what to install. */
int gemm_load(void);

/* "OpenBLAS 0.3.21 SkylakeX tiles 1", for the lineage. Needs gemm_load(). */
const char *gemm_lineage(void);

/* One single-threaded product in the calling thread, no epilogue; for tiles inside other work. */
void gemm_tile(const struct gemm *gemm);

/* All of them, in parallel; they must not depend on one another. n <= GEMM_BATCH_MAX. */
enum { GEMM_BATCH_MAX = 4 };
void gemm_run(struct threads *threads, const struct gemm *gemms, uint64_t n);

#endif
