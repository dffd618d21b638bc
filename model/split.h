/*
 * Master weights, split. With bf16 compute the f32 master weight is stored as two halves: the bf16
 * weight that the device computes with, and a 16-bit residual that only the optimizer needs. The
 * bus then carries 2 bytes per parameter, and no copy of the weights is stored twice.
 *
 *     hi = (bits + 0x8000) >> 16            bf16, rounded half up (in magnitude)
 *     lo = bits & 0xffff
 *     bits = ((hi - (lo >= 0x8000)) << 16) | lo
 *
 * The two additions are modulo 2^16, so that this is a bijection on all 2^32 patterns. Rounding
 * half to even would not be: it needs a 33rd bit. Two things follow: finite values above the
 * largest bf16 round to infinity as usual, and a NaN whose payload is all ones in the upper half
 * wraps to a zero in `hi` (the master is still exact; gradients are checked for NaN before any
 * update).
 */
#ifndef MODEL_SPLIT_H
#define MODEL_SPLIT_H

#include <stdint.h>

/* master: (n) f32; hi: (n) bf16; lo: (n) residuals. */
void split_master(const float *master, uint64_t n, uint16_t *hi, uint16_t *lo);

/* The inverse, bit for bit. */
void join_master(const uint16_t *hi, const uint16_t *lo, uint64_t n, float *master);

#endif
