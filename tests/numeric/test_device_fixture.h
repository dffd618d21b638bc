/*
 * What the tests of device operations share: devices of both dtypes, each with several threads and
 * with one; numbers that a dtype has; comparison with a plain twin in f64.
 */
#ifndef TESTS_NUMERIC_TEST_DEVICE_FIXTURE_H
#define TESTS_NUMERIC_TEST_DEVICE_FIXTURE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu_worker/device.h"
#include "procs/error.h"

static struct device *devices[2]; /* f32, bf16; several threads */
static struct device *alone[2];   /* the same with one thread */

static uint64_t random_state = 12345;

static inline double uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 40) / (double)(1 << 24) * 2 - 1;
}

static inline float to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* x as the device's dtype stores it */
static inline double rounded(const struct device *device, double x)
{
    return device->dtype == DEVICE_BF16 ? (double)to_bf16((float)x) : x;
}

/* n floats, and a guard behind them */
static inline float *floats(uint64_t n)
{
    float *x = calloc(n + 1, sizeof *x);
    assert_non_null(x);
    x[n] = 12345.0f;
    return x;
}

/* n numbers in [-size, size] that the dtype has, and a guard behind them */
static inline float *numbers(const struct device *device, uint64_t n, double size)
{
    float *x = floats(n);
    for (uint64_t i = 0; i < n; i++)
        x[i] = (float)rounded(device, uniform() * size);
    return x;
}

static inline compute_t *cells(float *x)
{
    return (compute_t *)(void *)x;
}

static inline double *zeros(uint64_t n)
{
    double *x = calloc(n, sizeof *x);
    assert_non_null(x);
    return x;
}

static inline void assert_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    assert_int_equal(bits & 0xffff, 0);
}

/* |found - expected| <= roundings x unit x (|expected| + rms), element by element; frees expected
 */
static inline void check(const char *what, const struct device *device, const float *found,
                         double *expected, uint64_t n, enum device_dtype stored, double roundings)
{
    double rms = 0;
    for (uint64_t i = 0; i < n; i++)
        rms += expected[i] * expected[i];
    rms = fmax(sqrt(rms / (double)n), 0.1); /* inputs are about 1: what cancels has errors too */
    double unit = device->dtype == DEVICE_BF16 ? 1.0 / 256 : 2e-6;
    for (uint64_t i = 0; i < n; i++) {
        double error = fabs((double)found[i] - expected[i]);
        if (!(error <= roundings * unit * (fabs(expected[i]) + rms)))
            fail_msg("%s[%lu]: expected %.9g, found %.9g", what, i, expected[i], (double)found[i]);
        if (stored == DEVICE_BF16 && device->dtype == DEVICE_BF16)
            assert_bf16(found[i]);
    }
    assert_true(found[n] == 12345.0f);
    free(expected);
}

/*
 * The twin rounded to bf16 where transformers does, so its numbers are the expected ones but for
 * those that lie at a tie in f64 and beside it in f32: at most one in 200, by one unit. A rounding
 * more or less changes one in ten or so. In f32, as check(). Frees expected.
 */
static inline void check_rounding(const char *what, const struct device *device, const float *found,
                                  double *expected, uint64_t n)
{
    if (device->dtype == DEVICE_F32) {
        check(what, device, found, expected, n, DEVICE_F32, 4);
        return;
    }
    uint64_t different = 0;
    for (uint64_t i = 0; i < n; i++) {
        different += fabs((double)found[i] - expected[i]) > 1e-7; /* what cancels is noise */
        assert_bf16(found[i]);
    }
    if (different > 1 + n / 200)
        fail_msg("%s: %lu of %lu numbers are rounded otherwise", what, different, n);
    check(what, device, found, expected, n, DEVICE_BF16, 2);
}

/* The same bits on devices with other thread counts; frees the second. */
static inline void check_same(const char *what, const float *found, float *again, uint64_t n)
{
    if (memcmp(found, again, n * sizeof *found) != 0)
        fail_msg("%s: other bits with another number of threads", what);
    free(again);
}

static inline int devices_open(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        enum device_dtype dtype = d == 0 ? DEVICE_F32 : DEVICE_BF16;
        if (device_cpu_open(&devices[d], dtype, (uint32_t)d + 2) < 0 ||
            device_cpu_open(&alone[d], dtype, 1) < 0)
            fail_msg("%s", error_text());
    }
    return 0;
}

static inline int devices_close(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        device_close(devices[d]);
        device_close(alone[d]);
    }
    return 0;
}

#endif
