/*
 * The order in which squares of a layer's gradient are added. Pure, header only.
 *
 * Floating-point addition is not associative, so the order is part of the contract: optimizer
 * workers reduce a page, the launcher reduces a layer's pages, and the result has to be the same
 * bits for every page size and worker count. The order is a balanced binary tree over the
 * 4096-element blocks of the layer; absent leaves are zero (adding them changes no bit, as no sum
 * is negative):
 *
 *     layer:           +                  a page of 2^k blocks is an aligned subtree, so its sum
 *                  /       \              is one inner node; the tree over page sums is the rest
 *     pages:     +           +
 *               / \         / \           NaN and Inf reach the top from any leaf; NaN comes out
 *     blocks:  0   1       2   (0)        as the one canonical quiet NaN
 */
#ifndef IPC_NORM_TREE_H
#define IPC_NORM_TREE_H

#include <math.h>
#include <stdint.h>

/* Partial sums of complete subtrees, largest first: a binary counter whose digits are sums. */
struct norm_tree {
    double sum[64];
    uint64_t leaves; /* bit k set: a subtree of 2^k leaves waits on the stack */
    unsigned depth;
};

static inline double norm_tree_add(double left, double right)
{
    double sum = left + right;
    return isnan(sum) ? (double)NAN : sum;
}

static inline void norm_tree_push(struct norm_tree *tree, double leaf)
{
    double sum = norm_tree_add(leaf, 0.0);
    for (uint64_t bit = 1; tree->leaves & bit; bit <<= 1)
        sum = norm_tree_add(tree->sum[--tree->depth], sum);
    tree->sum[tree->depth++] = sum;
    tree->leaves++;
}

/* The root, with leaves from tree->leaves to the next power of two taken as zero. */
static inline double norm_tree_root(const struct norm_tree *tree)
{
    if (tree->depth == 0)
        return 0.0;
    double sum = tree->sum[tree->depth - 1];
    for (unsigned i = tree->depth - 1; i-- > 0;)
        sum = norm_tree_add(tree->sum[i], sum);
    return sum;
}

/* Balanced binary tree over `n` leaves (f64), padded with zeros to a power of two. O(n), no
 * storage. */
static inline double norm_tree_sum(const double *leaves, uint64_t n)
{
    struct norm_tree tree = {.leaves = 0};
    for (uint64_t i = 0; i < n; i++)
        norm_tree_push(&tree, leaves[i]);
    return norm_tree_root(&tree);
}

/* A layer's sum of squares from the sums of its pages in page order (any one page size). */
static inline double norm_layer(const double *page_sums, uint64_t pages)
{
    return norm_tree_sum(page_sums, pages);
}

/* The global gradient norm from the layers' sums of squares, added in layer order. */
static inline double norm_global(const double *layer_sums, uint64_t layers)
{
    double sum = 0.0;
    for (uint64_t i = 0; i < layers; i++)
        sum = norm_tree_add(sum, layer_sums[i]);
    return sqrt(sum);
}

#endif
