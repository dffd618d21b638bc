/*
 * The three implementations behind adamw.h, one block of 4096 elements at a time. Inside a kernel
 * moments are never NULL and lr_decay is the block's own (0 where exempt): adamw.c sees to both.
 */
#ifndef OPT_WORKER_ADAMW_KERNEL_H
#define OPT_WORKER_ADAMW_KERNEL_H

#include "opt_worker/adamw.h"

/* How outputs are written. STREAMED needs them aligned to 64 bytes and an sfence after the page. */
enum adamw_store { ADAMW_STORE_CACHED, ADAMW_STORE_STREAMED };

typedef void adamw_block_f32(const struct adamw_scalars *s, const struct adamw_page_f32 *block,
                             enum adamw_store store);
typedef void adamw_block_split(const struct adamw_scalars *s, const struct adamw_page_split *block,
                               enum adamw_store store);

adamw_block_f32 adamw_block_f32_scalar, adamw_block_f32_avx2, adamw_block_f32_avx512;
adamw_block_split adamw_block_split_scalar, adamw_block_split_avx2, adamw_block_split_avx512;

/* Overrides how whole pages are stored where alignment allows it. For benchmarks. */
void adamw_store_use(enum adamw_store store);

#endif
