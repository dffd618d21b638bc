#pragma GCC target("avx2,fma")
#include "gpu_worker/device_cpu/gemm.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu_worker/device_cpu/simd.h"
#include "procs/check.h"
#include "procs/error.h"

/*
 * The grid. BLAS packs both operands of every call, so that large tiles are faster (measured on
 * Sapphire Rapids in a training step: 1024 x 1024 takes 13 % less time than 256 x 384), while
 * threads need some tiles to share out. The first of these sizes that gives TILES_ENOUGH tiles is
 * taken, or the last.
 */
static const struct {
    uint64_t rows, cols;
} tile_sizes[] = {{512, 1024}, {512, 512}, {256, 512}, {256, 256}, {128, 256}};
enum {
    TILE_SIZES = sizeof tile_sizes / sizeof tile_sizes[0],
    TILES_ENOUGH = 8,
    TILE_ALIGN = 16,
    TILES_VERSION = 1, /* named in the lineage: changes with the grid's rules */
};

/* the values of CBLAS's enumerations */
enum { CBLAS_ROW_MAJOR = 101, CBLAS_AS_IS = 111, CBLAS_TRANSPOSED = 112 };

typedef void (*cblas_sgemm_function)(int order, int transpose_a, int transpose_b, int m, int n,
                                     int k, float alpha, const float *a, int lda, const float *b,
                                     int ldb, float beta, float *c, int ldc);

static struct {
    cblas_sgemm_function sgemm;
    char lineage[256];
} blas;

/* The kernels that this CPU can run, whatever OpenBLAS makes of its model number; NULL: let it
 * choose. */
static const char *blas_core(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd"))
        return "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return "Haswell";
    return NULL;
}

static const char *blas_text(void *library, const char *symbol)
{
    char *(*text)(void);
    *(void **)&text = dlsym(library, symbol); /* POSIX's way from an object to a function pointer */
    return text == NULL ? "unknown" : text();
}

int gemm_load(void)
{
    if (blas.sgemm != NULL)
        return 0;
    const char *core = blas_core();
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 1); /* can fail only for want of memory */
    if (core != NULL)
        (void)setenv("OPENBLAS_CORETYPE", core, 0);
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        (void)error_set(ERROR_FAILED, "cannot load OpenBLAS: %s", dlerror());
        return error_hint("install it: apt-get install libopenblas0-pthread");
    }
    cblas_sgemm_function sgemm;
    *(void **)&sgemm = dlsym(library, "cblas_sgemm");
    if (sgemm == NULL)
        return error_set(ERROR_FAILED, "libopenblas.so.0: expected cblas_sgemm, found none");
    char version[64] = "";
    (void)sscanf(blas_text(library, "openblas_get_config"), "%*s %63s", version);
    snprintf(blas.lineage, sizeof blas.lineage, "OpenBLAS %s %s tiles %d", version,
             blas_text(library, "openblas_get_corename"), TILES_VERSION);
    blas.sgemm = sgemm;
    return 0;
}

const char *gemm_lineage(void)
{
    return blas.lineage;
}

void gemm_tile(const struct gemm *g)
{
    blas.sgemm(CBLAS_ROW_MAJOR, g->transpose_a == GEMM_TRANSPOSED ? CBLAS_TRANSPOSED : CBLAS_AS_IS,
               g->transpose_b == GEMM_TRANSPOSED ? CBLAS_TRANSPOSED : CBLAS_AS_IS, (int)g->m,
               (int)g->n, (int)g->k, 1.0f, g->a, (int)g->lda, g->b, (int)g->ldb, g->beta, g->c,
               (int)g->ldc);
}

/* One product's grid. */
struct grid {
    uint64_t tile_rows, tile_cols, across, tiles;
};

struct batch {
    const struct gemm *gemms;
    uint64_t n;
    struct grid grids[GEMM_BATCH_MAX];
};

static uint64_t pieces(uint64_t length, uint64_t target)
{
    return (length + target - 1) / target;
}

/* `length` in equal pieces of at most `target`, rounded up to the kernels' width */
static uint64_t piece(uint64_t length, uint64_t target)
{
    uint64_t n = pieces(length, target);
    uint64_t each = (length + n - 1) / n;
    return (each + TILE_ALIGN - 1) / TILE_ALIGN * TILE_ALIGN;
}

static struct grid grid_of(const struct gemm *g, int size)
{
    struct grid grid = {.tile_rows = piece(g->m, tile_sizes[size].rows),
                        .tile_cols = piece(g->n, tile_sizes[size].cols)};
    grid.across = pieces(g->n, grid.tile_cols);
    grid.tiles = grid.across * pieces(g->m, grid.tile_rows);
    return grid;
}

static uint64_t lay_grids(struct batch *batch, int size)
{
    uint64_t tiles = 0;
    for (uint64_t i = 0; i < batch->n; i++) {
        batch->grids[i] = grid_of(&batch->gemms[i], size);
        tiles += batch->grids[i].tiles;
    }
    return tiles;
}

static void epilogue(const struct gemm *tile)
{
    enum rounding rounding = tile->round == GEMM_ROUND_BF16 ? ROUND_BF16 : ROUND_NONE;
    for (uint64_t i = 0; i < tile->m; i++) {
        float *c = tile->c + i * tile->ldc;
        const float *residual = tile->residual == NULL ? NULL : tile->residual + i * tile->ldc;
        for (uint64_t j = 0; j < tile->n; j += LANES) {
            uint64_t left = tile->n - j;
            v8 x = v8_load(c + j, left);
            if (tile->bias != NULL)
                x = _mm256_add_ps(x, v8_load(tile->bias + j, left));
            x = v8_round(x, rounding);
            if (residual != NULL)
                x = v8_round(_mm256_add_ps(v8_load(residual + j, left), x), rounding);
            v8_store(c + j, left, x);
        }
    }
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void run_tile(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct batch *batch = context;
    uint64_t which = 0;
    while (item >= batch->grids[which].tiles)
        item -= batch->grids[which++].tiles;
    const struct grid *grid = &batch->grids[which];
    struct gemm tile = batch->gemms[which];
    uint64_t row = item / grid->across * grid->tile_rows;
    uint64_t col = item % grid->across * grid->tile_cols;
    tile.m = least(tile.m - row, grid->tile_rows);
    tile.n = least(tile.n - col, grid->tile_cols);
    tile.a += tile.transpose_a == GEMM_TRANSPOSED ? row : row * tile.lda;
    tile.b += tile.transpose_b == GEMM_TRANSPOSED ? col * tile.ldb : col;
    tile.c += row * tile.ldc + col;
    if (tile.residual != NULL)
        tile.residual += row * tile.ldc + col;
    if (tile.bias != NULL)
        tile.bias += col;
    gemm_tile(&tile);
    if (tile.residual != NULL || tile.bias != NULL || tile.round == GEMM_ROUND_BF16)
        epilogue(&tile);
}

void gemm_run(struct threads *threads, const struct gemm *gemms, uint64_t n)
{
    CHECK(n <= GEMM_BATCH_MAX);
    for (uint64_t i = 0; i < n; i++) /* BLAS counts in int; rows and columns of tiles are small */
        CHECK(gemms[i].lda <= INT32_MAX && gemms[i].ldb <= INT32_MAX && gemms[i].ldc <= INT32_MAX &&
              gemms[i].k <= INT32_MAX);
    struct batch batch = {.gemms = gemms, .n = n};
    int size = 0;
    uint64_t tiles = lay_grids(&batch, size);
    while (tiles < TILES_ENOUGH && size + 1 < TILE_SIZES)
        tiles = lay_grids(&batch, ++size);
    threads_run(threads, tiles, run_tile, &batch);
}
