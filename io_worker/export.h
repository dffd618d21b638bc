/*
 * A Hugging Face folder out of pages.
 *
 * The folder is written beside its final place as `OUT.tmp` and renamed when everything in it is
 * durable, so OUT is a whole model or absent (or the whole model that it was before). A file
 * EXPORT_MARKER in it says that it is ours: only folders with it are ever replaced or deleted.
 *
 *     export_open(&e, &config);                      // checks, copies config and tokenizer files
 *     for each page p in the layout's order:
 *         export_page(e, &layout->pages[p], weights, residual);
 *     export_finish(e);                              // index, fsync, rename
 *     export_close(e);                               // always; removes what is not finished
 *
 * Memory is a fixed chunk besides the caller's frame.
 */
#ifndef IO_WORKER_EXPORT_H
#define IO_WORKER_EXPORT_H

#include <stdint.h>

#include "model/layout.h"

#define EXPORT_MARKER "mtlaunch_export.txt"

#define EXPORT_DTYPE_AUTO (-1)

struct export;

struct export_config {
    const struct model_layout *layout; /* outlives the export */
    const char *model_folder;          /* config.json and tokenizer files are copied from here */
    const char *tokenizer; /* a file to be its tokenizer.json; NULL or "": the model folder's */
    const char *weights_folder; /* of the source's weights, for dtypes; NULL: random numbers */
    const char *out;            /* the folder to make; its parent is created when absent */
    /*
     * enum model_dtype (F32, BF16, F16), or EXPORT_DTYPE_AUTO: each tensor keeps the dtype that it
     * has in weights_folder; a model that began as random numbers takes config.json's dtype
     * (torch_dtype / dtype, float32 where there is none), as transformers would save it.
     */
    int32_t dtype;
    uint64_t step; /* written into the marker */
};

/*
 * Whether the files that an export copies from the model folder lie in it (model/folder_file.h), to
 * be asked before a run rather than at its end. -ERROR_USER naming the file.
 */
int export_check_folder(const char *model_folder);

/*
 * -ERROR_USER: the model folder or a dtype cannot be used, or `out` exists and is neither an export
 * nor empty. -ERROR_FIT: no space for the model in the file system of `out`. -ERROR_FAILED: I/O.
 * Pairs with export_close().
 */
int export_open(struct export **e, const struct export_config *config);

/* Bytes of the weights files, for progress. */
uint64_t export_bytes(const struct export *e);

/*
 * The next page in the layout's order: weights and residual as import_page() makes them. Rounds to
 * nearest even where the tensor's dtype is smaller. -ERROR_FAILED: I/O, or a finite weight beyond
 * float16's range.
 */
int export_page(struct export *e, const struct model_page *page, const void *weights,
                const uint16_t *residual);

/* All pages were given. Makes everything durable and renames the folder into place. */
int export_finish(struct export *e);

void export_close(struct export *e); /* NULL is fine */

/*
 * Deletes the oldest of directory/step-N until `keep` are left, looking only at folders that are
 * ours (EXPORT_MARKER). keep == 0 keeps all. Leftovers of interrupted exports are removed too.
 */
int export_rotate(const char *directory, uint64_t keep);

#endif
