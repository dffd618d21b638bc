/*
 * The gradient norm's leaves: sums of squares of a page, in the fixed order that makes the norm the
 * same bits for every page size, worker count and instruction set (DESIGN 8; ipc/norm_tree.h has
 * the part of the order that the launcher shares).
 *
 * Inside a block of 4096 elements, 32 lanes: lane l adds the squares of elements l, l + 32, ... in
 * f64, in that order (the square of an f32 is exact in f64); then lane l takes l + 16, then l + 8,
 * 4, 2, 1. Denormal gradients count as zero.
 */
#ifndef OPT_WORKER_NORM_H
#define OPT_WORKER_NORM_H

#include "ipc/norm_tree.h"

#include <stdint.h>

enum { NORM_BLOCK_ELEMENTS = 4096, NORM_LANES = 32 };

/*
 * Piece by piece over one page's gradient: pushes the sums of squares of the blocks of `g`
 * (elements) f32 on a tree that began as {.leaves = 0}. `elements` is a multiple of 4096 (CHECK).
 * In the end norm_tree_root() is the page's value: that of its aligned subtree of 2^k leaves,
 * absent ones zero. NaN or Inf anywhere in `g` gives NaN or Inf.
 */
void norm_push(struct norm_tree *tree, const float *g, uint64_t elements);

#endif
