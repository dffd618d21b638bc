/*
 * Counter-based random numbers: element i of a stream is a function of the stream's key and of i,
 * so that any process can make any part of it, in any order, and get the same bits (DESIGN 8).
 *
 * Philox4x32-10: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
 * 1, 2, 3", SC 2011. A stream is named by (seed, purpose, step, layer). One Philox call, keyed by
 * the seed, maps (purpose, layer, step) to 128 bits; two words of them are the key and two the
 * upper half of the counter of the stream; the lower half counts groups of four elements. For one
 * seed that map is a bijection, so two streams of one run never share a counter sequence.
 *
 * Normal numbers take 32 random bits each through the inverse of the normal distribution function.
 * log and the quantile are computed here with + - * / and sqrt alone (all exactly rounded by IEEE
 * 754), so the bits are the same with every C library. |x| <= 6.34 standard deviations.
 */
#ifndef MODEL_RANDOM_H
#define MODEL_RANDOM_H

#include <stdint.h>

/* Written into no file but into results: never renumber. */
enum random_purpose {
    RANDOM_INIT_WEIGHTS = 1,
    RANDOM_SHUFFLE = 2,
    RANDOM_SAMPLING = 3,
    RANDOM_TEST = 4,
    RANDOM_RECOMPUTE = 5,
};

struct random_key {
    uint64_t seed;
    uint64_t step;
    uint32_t purpose; /* enum random_purpose */
    uint32_t layer;
};

/* One Philox4x32-10 block, as published; for tests and for those who need their own counters. */
void random_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* out: (n) 32 uniform bits each, of elements first_element.. */
void random_bits_fill(struct random_key key, uint64_t first_element, uint64_t n, uint32_t *out);

/* Element `element` as a double in (0, 1): (bits + 0.5) / 2^32, never 0 and never 1. */
double random_uniform(struct random_key key, uint64_t element);

/* out: (n) f32, element first_element + i: N(0, stddev^2). */
void random_normal_fill(struct random_key key, uint64_t first_element, uint64_t n, float *out,
                        float stddev);

/* The standard normal quantile at p in (0, 1), to about 1e-15 relative. */
double random_normal_quantile(double p);

/*
 * A permutation of [0, n) that needs no memory: returns where `index` < n goes in that epoch.
 * For fixed (seed, epoch, n) it is a bijection. A Feistel network on the next power of four, walked
 * until it lands inside [0, n): fewer than 4 walks on average. n <= 2^62.
 */
uint64_t random_permute(uint64_t seed, uint64_t epoch, uint64_t n, uint64_t index);

#endif
