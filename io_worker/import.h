/*
 * Version 0 of the pages: from a Hugging Face folder, or from random numbers.
 *
 *     if (import_open(&im, &config) < 0) ...         // everything is checked before a page is made
 *     for each page p:
 *         import_page(im, &layout->pages[p], weights, residual);   // frame parts of the page
 *     import_close(im);
 *
 * Memory is a fixed chunk besides the caller's frame. Pages may be made in any order, and again.
 */
#ifndef IO_WORKER_IMPORT_H
#define IO_WORKER_IMPORT_H

#include <stdint.h>

#include "model/layout.h"

struct import;

struct import_config {
    const struct model_layout *layout; /* outlives the import */
    const char *folder;                /* with the weights; NULL: random numbers (DESIGN 9) */
    uint64_t seed;                     /* of the random numbers */
};

/*
 * Opens the checkpoint and checks every tensor's name, shape and dtype against the layout, a head
 * beside tied embeddings against them, and that what exports will copy lies in the folder.
 * -ERROR_USER naming file, tensor, expected and found. Pairs with import_close().
 */
int import_open(struct import **im, const struct import_config *config);

/*
 * Fills the master weights of a page; padding is zero.
 *   residual == NULL (float32 compute):  weights (page->elements) f32, the master itself
 *   else (bfloat16 compute):             weights (page->elements) bf16 = high half,
 *                                        residual (page->elements) u16 = low half (model/split.h)
 * -ERROR_USER: a value that is not finite (tensor and element named). -ERROR_FAILED: read error.
 */
int import_page(struct import *im, const struct model_page *page, void *weights,
                uint16_t *residual);

void import_close(struct import *im); /* NULL is fine */

#endif
