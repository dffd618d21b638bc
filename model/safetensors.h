/*
 * The safetensors format (github.com/huggingface/safetensors, "Format").
 *
 *     | u64 LE: N | N bytes of JSON: {"name": {"dtype", "shape", "data_offsets": [from, to]}, ...}
 * | data |
 *
 * data_offsets count from the start of the data. The tensors cover the data without hole or
 * overlap, N is at most 100 MB, names are unique. A model is one file model.safetensors, or shards
 * named by model.safetensors.index.json: {"weight_map": {"name": "file", ...}}.
 *
 * Reading and writing stream: memory is the headers plus the caller's chunk, never a tensor, never
 * a mapping. A file that breaks a rule is refused whole when it is opened. Verdicts are those of
 * the reference library (tests/unit/test_safetensors_reference.c), but stricter where it takes what
 * the format forbids (a name twice, space before the first brace) or what no model has (the limits
 * below, sizes of 2^63, types that we do not know).
 */
#ifndef MODEL_SAFETENSORS_H
#define MODEL_SAFETENSORS_H

#include <stdint.h>

#include "model/dtype.h"

enum {
    SAFETENSORS_NAME_BYTES = 256, /* with the terminating zero; longer names are refused */
    SAFETENSORS_DIMS_MAX = 8,
    SAFETENSORS_SHARDS_MAX = 10000,
    SAFETENSORS_TENSORS_MAX = 1 << 18, /* of all shards; the largest models known have half of it */
};

#define SAFETENSORS_HEADER_BYTES_MAX    ((uint64_t)100000000)  /* as the reference implementation */
#define SAFETENSORS_SHARD_BYTES_DEFAULT ((uint64_t)5000000000) /* as save_pretrained() */

struct safetensors_tensor {
    char name[SAFETENSORS_NAME_BYTES];
    enum model_dtype dtype;
    uint32_t n_dims; /* 0: a scalar */
    uint64_t shape[SAFETENSORS_DIMS_MAX];
    uint64_t elements;
    uint32_t file;   /* index for safetensors_file_path() */
    uint64_t offset; /* bytes from the start of the file */
    uint64_t bytes;
};

/* ---- reading; all functions but open and close may be called from many threads ---- */

struct safetensors;

/*
 * Opens model.safetensors in `folder`, or else the shards of model.safetensors.index.json: names
 * without separators, files of the model's own tree (model/folder_file.h). Every shard holds what
 * the index says, and nothing else.
 * Errors: ERROR_USER for anything wrong in the files, naming file, tensor, expected and found;
 * ERROR_FAILED for I/O and memory. Pairs with safetensors_close().
 */
int safetensors_open_folder(struct safetensors **st, const char *folder);

/* Opens one file by its path, wherever it leads. */
int safetensors_open_file(struct safetensors **st, const char *path);

void safetensors_close(struct safetensors *st); /* NULL is fine */

uint64_t safetensors_n_tensors(const struct safetensors *st);

/* The i-th tensor in the order of names (strcmp), i < safetensors_n_tensors(). */
const struct safetensors_tensor *safetensors_tensor_at(const struct safetensors *st, uint64_t i);

/* Returns 0 and fills `out`, or -1 (no error set) when there is no such tensor. */
int safetensors_find(const struct safetensors *st, const char *name,
                     struct safetensors_tensor *out);

/* For messages. */
const char *safetensors_file_path(const struct safetensors *st, uint32_t file);

/*
 * Elements [first_element, first_element + count) in row-major order, converted to f32. out:
 * (count). Errors: ERROR_USER for a dtype other than F32, BF16, F16; ERROR_FAILED for I/O. A range
 * outside the tensor is a programmer error.
 */
int safetensors_read(const struct safetensors *st, const struct safetensors_tensor *tensor,
                     uint64_t first_element, uint64_t count, float *out);

/* The same without conversion: count * model_dtype_bytes(tensor->dtype) bytes. Any dtype. */
int safetensors_read_raw(const struct safetensors *st, const struct safetensors_tensor *tensor,
                         uint64_t first_element, uint64_t count, void *out);

/* ---- writing ----
 *
 *     safetensors_writer_open(&w, folder, SAFETENSORS_SHARD_BYTES_DEFAULT);
 *     for each tensor: safetensors_writer_declare(w, name, dtype, n_dims, shape);
 *     safetensors_writer_start(w);                      // now the shards are known; headers are
 * written for each tensor, in the order of declaration, in chunks of any size:
 *         safetensors_writer_write(w, f32, n);          // or _write_raw
 *     safetensors_writer_finish(w);                     // all there? index, fsync of files and
 * folder safetensors_writer_close(w);                      // always
 *
 * `folder` exists and holds no weights yet. Give it a temporary name and rename it afterwards:
 * until finish() has returned 0 it is not a model. Every file is byte for byte what the reference
 * implementation writes for these tensors with metadata {"format": "pt"}: within a file larger
 * dtypes first, then by name.
 */
struct safetensors_writer;

/* shard_bytes_max: data bytes of a shard; a larger tensor gets a shard of its own. */
int safetensors_writer_open(struct safetensors_writer **w, const char *folder,
                            uint64_t shard_bytes_max);

/* Errors: ERROR_USER for a name that is too long or declared twice; ERROR_FAILED for memory. */
int safetensors_writer_declare(struct safetensors_writer *w, const char *name,
                               enum model_dtype dtype, uint32_t n_dims, const uint64_t *shape);

/* Bytes of all weight files together, index aside; known after start(), when nothing is written
 * yet. */
uint64_t safetensors_writer_bytes(const struct safetensors_writer *w);

/* Elements that the tensor being written still lacks; 0 when all tensors are complete. */
uint64_t safetensors_writer_missing(const struct safetensors_writer *w);

/* Cuts into shards and places every tensor. Files are created as writing reaches them. */
int safetensors_writer_start(struct safetensors_writer *w);

/*
 * The next `count` elements, rounded to the declared dtype (F32, BF16 or F16) to nearest even. May
 * not go past the end of the current tensor. values: (count) f32.
 */
int safetensors_writer_write(struct safetensors_writer *w, const float *values, uint64_t count);

/* The next `count` elements as they are. */
int safetensors_writer_write_raw(struct safetensors_writer *w, const void *values, uint64_t count);

/* Errors: ERROR_FAILED for I/O (fsync is never retried). Missing elements are a programmer error.
 */
int safetensors_writer_finish(struct safetensors_writer *w);

void safetensors_writer_close(struct safetensors_writer *w); /* NULL is fine */

#endif
