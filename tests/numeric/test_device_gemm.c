/* gemm_run() and gemm_tile() against a plain double loop, and against themselves on more threads.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu_worker/device_cpu/gemm.h"
#include "procs/error.h"

static uint64_t random_state = 0x9e3779b97f4a7c15;

static float random_float(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 40) / (double)(1 << 24) - 0.5);
}

static float *random_matrix(uint64_t elements)
{
    float *x = malloc(elements * sizeof *x);
    assert_non_null(x);
    for (uint64_t i = 0; i < elements; i++)
        x[i] = random_float();
    return x;
}

static double element(const float *x, uint64_t ld, enum gemm_transpose transpose, uint64_t row,
                      uint64_t col)
{
    return transpose == GEMM_TRANSPOSED ? (double)x[col * ld + row] : (double)x[row * ld + col];
}

/* Largest error relative to sum |a| |b| (+ |c|). `before` is c as it was. */
static double worst_error(const struct gemm *g, const float *before)
{
    double worst = 0;
    for (uint64_t i = 0; i < g->m; i++)
        for (uint64_t j = 0; j < g->n; j++) {
            double sum = g->beta != 0 ? (double)before[i * g->ldc + j] : 0;
            double size = fabs(sum) + 1e-30;
            for (uint64_t k = 0; k < g->k; k++) {
                double product = element(g->a, g->lda, g->transpose_a, i, k) *
                                 element(g->b, g->ldb, g->transpose_b, k, j);
                sum += product;
                size += fabs(product);
            }
            double error = fabs((double)g->c[i * g->ldc + j] - sum) / size;
            if (!(error <= worst))
                worst = error; /* a NaN too */
        }
    return worst;
}

static void check_shape(struct threads *threads, uint64_t m, uint64_t n, uint64_t k)
{
    for (int variant = 0; variant < 8; variant++) {
        struct gemm g = {.transpose_a = variant & 1 ? GEMM_TRANSPOSED : GEMM_AS_IS,
                         .transpose_b = variant & 2 ? GEMM_TRANSPOSED : GEMM_AS_IS,
                         .beta = variant & 4 ? 1.0f : 0.0f,
                         .m = m,
                         .n = n,
                         .k = k,
                         .ldc = n + 3};
        uint64_t a_rows = variant & 1 ? k : m, b_rows = variant & 2 ? n : k;
        g.lda = (variant & 1 ? m : k) + 1;
        g.ldb = (variant & 2 ? k : n) + 2;
        float *a = random_matrix(a_rows * g.lda), *b = random_matrix(b_rows * g.ldb);
        float *c = random_matrix(m * g.ldc), *before = malloc(m * g.ldc * sizeof *before);
        if (g.beta == 0)
            for (uint64_t i = 0; i < m * g.ldc; i++)
                c[i] = NAN;
        memcpy(before, c, m * g.ldc * sizeof *c);
        g.a = a;
        g.b = b;
        g.c = c;
        if (threads != NULL)
            gemm_run(threads, &g, 1);
        else
            gemm_tile(&g);
        double error = worst_error(&g, before);
        if (!(error <= 1e-6))
            fail_msg("%lu x %lu x %lu, variant %d: error %g", m, n, k, variant, error);
        for (uint64_t i = 0; i < m; i++) /* what lies between the rows is not touched */
            assert_memory_equal(c + i * g.ldc + n, before + i * g.ldc + n, 3 * sizeof *c);
        free(a);
        free(b);
        free(c);
        free(before);
    }
}

static void small_products_match_a_double_loop_over_all_transposes(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 48, 63, 64, 65, 70};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    for (int i = 0; i < SIZES; i++)
        for (int j = 0; j < SIZES; j++)
            for (int k = 0; k < SIZES; k++)
                check_shape(NULL, sizes[i], sizes[j], sizes[k]);
}

static void large_products_match_a_double_loop(void **state)
{
    struct threads *threads = *state;
    check_shape(threads, 257, 385, 129);
    check_shape(threads, 1025, 70, 33);
    check_shape(threads, 40, 1200, 450);
    check_shape(threads, 300, 200, 1000);
}

static void the_epilogue_rounds_the_product_and_then_the_sum_with_the_residual(void **state)
{
    struct threads *threads = *state;
    enum { M = 37, N = 29 };
    /* k = 1: the product is exact to the last bit before it is rounded */
    float *a = random_matrix(M), *b = random_matrix(N), *residual = random_matrix(M * N);
    float c[M * N];
    for (int i = 0; i < M * N; i++) { /* bf16 numbers */
        uint32_t bits;
        memcpy(&bits, &residual[i], 4);
        bits &= 0xffff0000;
        memcpy(&residual[i], &bits, 4);
    }
    struct gemm g = {.m = M,
                     .n = N,
                     .k = 1,
                     .a = a,
                     .lda = 1,
                     .b = b,
                     .ldb = N,
                     .c = c,
                     .ldc = N,
                     .residual = residual,
                     .round = GEMM_ROUND_BF16};
    gemm_run(threads, &g, 1);
    for (int i = 0; i < M * N; i++) {
        float product = a[i / N] * b[i % N];
        for (int step = 0; step < 2; step++) {
            uint32_t bits;
            memcpy(&bits, &product, 4);
            bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
            memcpy(&product, &bits, 4);
            if (step == 0)
                product += residual[i];
        }
        assert_memory_equal(&c[i], &product, sizeof product);
    }
    free(a);
    free(b);
    free(residual);
}

/* Three products of one batch; returns the three results in one block. */
static float *run_batch(uint32_t count, const float *a, const float *b, uint64_t *bytes)
{
    struct threads *threads;
    assert_int_equal(threads_open(&threads, count), 0);
    static const uint64_t shapes[3][3] = {{700, 390, 111}, {129, 1000, 64}, {384, 384, 777}};
    struct gemm g[3];
    uint64_t total = 0;
    for (int i = 0; i < 3; i++)
        total += shapes[i][0] * shapes[i][1];
    float *c = calloc(total, sizeof *c), *next = c;
    assert_non_null(c);
    for (int i = 0; i < 3; i++) {
        uint64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
        g[i] = (struct gemm){.transpose_a = i == 2 ? GEMM_TRANSPOSED : GEMM_AS_IS,
                             .transpose_b = i == 0 ? GEMM_TRANSPOSED : GEMM_AS_IS,
                             .m = m,
                             .n = n,
                             .k = k,
                             .a = a,
                             .lda = i == 2 ? m : k,
                             .b = b,
                             .ldb = i == 0 ? k : n,
                             .c = next,
                             .ldc = n,
                             .beta = 1};
        next += m * n;
    }
    for (int repeat = 0; repeat < 4; repeat++)
        gemm_run(threads, g, 3);
    threads_close(threads);
    *bytes = total * sizeof *c;
    return c;
}

static void bits_do_not_depend_on_the_number_of_threads(void **state)
{
    (void)state;
    float *a = random_matrix(400000), *b = random_matrix(400000);
    uint64_t bytes;
    float *expected = run_batch(1, a, b, &bytes);
    for (uint32_t count = 2; count <= 5; count++) {
        float *found = run_batch(count, a, b, &bytes);
        assert_memory_equal(found, expected, bytes);
        free(found);
    }
    free(expected);
    free(a);
    free(b);
}

static void count_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    ((uint8_t *)context)[item]++;
}

static void each_item_of_a_parallel_loop_runs_exactly_once(void **state)
{
    (void)state;
    enum { ITEMS = 999 };
    uint8_t runs[ITEMS];
    for (uint32_t count = 1; count <= 5; count++) {
        struct threads *threads;
        assert_int_equal(threads_open(&threads, count), 0);
        for (uint64_t items = 0; items < ITEMS; items = items * 2 + 1) {
            memset(runs, 0, sizeof runs);
            threads_run(threads, items, count_item, runs);
            for (uint64_t i = 0; i < ITEMS; i++)
                assert_int_equal(runs[i], i < items ? 1 : 0);
        }
        threads_close(threads);
    }
}

static void the_lineage_names_library_and_core(void **state)
{
    (void)state;
    print_message("%s\n", gemm_lineage());
    assert_non_null(strstr(gemm_lineage(), "OpenBLAS 0."));
    assert_null(strstr(gemm_lineage(), "Prescott"));
}

static int set_up(void **state)
{
    if (gemm_load() < 0)
        fail_msg("%s", error_text());
    return threads_open((struct threads **)state, 2);
}

static int tear_down(void **state)
{
    threads_close(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_item_of_a_parallel_loop_runs_exactly_once),
        cmocka_unit_test(the_lineage_names_library_and_core),
        cmocka_unit_test(small_products_match_a_double_loop_over_all_transposes),
        cmocka_unit_test(large_products_match_a_double_loop),
        cmocka_unit_test(the_epilogue_rounds_the_product_and_then_the_sum_with_the_residual),
        cmocka_unit_test(bits_do_not_depend_on_the_number_of_threads),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
