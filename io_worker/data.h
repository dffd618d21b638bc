/*
 * Training data: files in, samples out.
 *
 * data_open() turns every source into a file of tokens: token shards are used where they lie, text
 * is tokenized once into `cache_dir`. After that a sample is a pure function of the configuration
 * and of its number in the run, so that a resumed run needs no position other than that number:
 *
 *      q = 0, 1, 2, ...            the run's samples, in the order in which they are trained
 *      epoch = q / n               n = data_samples(d, DATA_TRAIN)
 *      index = random_permute(seed, epoch, n, q % n)      or q % n without shuffle
 *
 * Validation samples are never shuffled, so that every evaluation sees the same ones.
 *
 *      packed text    |aaaaaaaE bbbbE cc|ccccE ddddddddd|ddE ...      cut every seq_len tokens
 *      conversations  |aaaaaE bbbbE.....|ccccE dddddddE..|ddE ...      whole ones, the rest padded
 *      packed shards   the same, but the label of the last position is the next sample's first
 * token (a sample is seq_len + 1 tokens and the next begins seq_len further) not packed
 * |aaaaaaaE.........|bbbbE..........| ...         a document per sample, long ones cut, the rest
 * padded
 *
 * Of a conversation only what the assistant says is a label: the token file says which tokens are.
 * One longer than seq_len is cut off there, or left out (drop_overlong).
 *
 * E is the token that ends a document. It belongs to the document that it ends: it is a label (the
 * model learns to stop), but has none itself. A document that is cut continues in its next sample
 * as if it began there: what a sample does not contain cannot be attended to.
 *
 *      struct data *d;
 *      if (data_open(&d, &config, NULL, NULL) < 0)
 *          return error_wrap("data");
 *      for (uint64_t q = 0; q < steps * batch; q++)
 *          if (data_read_sample(d, DATA_TRAIN, q, &sample) < 0) ...
 *      data_close(d);
 *
 * Every block of 64 KiB of tokens, and of an index, has a hash that is compared at each read
 * (data_checks.h): -ERROR_FAILED, "damaged".
 *
 * Memory is bounded: file names and counts, one sample, a few open files; while a file is made or
 * scanned, 8 bytes for each 64 KiB of it. Documents are never
 * listed in RAM; without packing they are listed in an index file that is searched where it lies.
 */
#ifndef IO_WORKER_DATA_H
#define IO_WORKER_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DATA_NO_LABEL (-1) /* a position that is not trained on */
#define DATA_NO_EOS   (-1) /* the model has no token that ends a document */

enum data_set { DATA_TRAIN, DATA_VALIDATION };

enum data_format {
    DATA_FORMAT_AUTO, /* by the name: .txt, .jsonl are text, .bin are token shards, .mttokens token
                         files */
    DATA_FORMAT_TEXT, /* .jsonl: one {"text": "..."} a line; any other name: the file is a document
                       */
    DATA_FORMAT_TOKENS, /* llm.c or nanoGPT shards or token files, told apart by their first bytes
                         */
};

enum data_tokenizer {
    DATA_TOKENIZER_BYTES, /* model/tokenizer_bytes.h: ids 0-255 are bytes, 256 ends a document */
    DATA_TOKENIZER_FILE,  /* a tokenizer.json; text is refused, token files are what it made */
};

struct data_config {
    const char *const *train; /* paths, at least one */
    size_t n_train;
    const char *const *validation; /* paths; none: val_fraction, or no validation at all */
    size_t n_validation;
    double val_fraction; /* in [0, 1): the last samples of `train` that validate and never train */
    enum data_format format;
    enum data_tokenizer tokenizer;
    bool packing;
    bool drop_overlong; /* conversations longer than seq_len; false: they are cut off there */
    bool shuffle;
    /* packed: keep the last samples' incomplete end, padded, so that an evaluation sees every
     * token; false: it is dropped, so that every sample trained is full */
    bool keep_partial;
    const char *cache_dir; /* created when absent */
    uint64_t seq_len;      /* tokens per sample, at least 2 */
    uint64_t vocab_size;   /* of the model */
    int64_t eos_id;        /* of the model, or DATA_NO_EOS; text in bytes always uses 256 */
    uint64_t seed;
};

/*
 * One sample, each array (seq_len) i32, owned by the caller.
 *   tokens         ids; padding is the end-of-document id (0 where there is none)
 *   labels         the id to predict at each position, or DATA_NO_LABEL
 *   position       counts from 0 in each document of the sample
 *   document_start index in the sample at which the document of this position starts; position t
 * may attend to document_start[t] .. t. Padding is a document of its own.
 */
struct data_sample {
    int32_t *tokens;
    int32_t *labels;
    int32_t *position;
    int32_t *document_start;
};

/*
 * Called while sources are scanned and tokenized, at least every 4 MiB: `path` is the source,
 * `done` of `total` bytes of it are read. A result other than 0 stops: data_open then returns
 * -ERROR_STOPPED and leaves nothing half-written behind.
 */
typedef int data_progress_fn(void *arg, const char *path, uint64_t done, uint64_t total);

struct data;

/*
 * Checks and opens all sources; tokenizes text that is not yet in the cache. `progress` may be
 * NULL. Strings of the configuration are copied. Errors (-ERROR_USER): no such file, unreadable,
 * empty, not UTF-8 (file and byte offset; for .jsonl also the line), a bad .jsonl line, a damaged
 * or truncated shard (header count and file size), an id outside the vocabulary (shard, offset,
 * id), text and shards mixed, text with a tokenizer file, a vocabulary under 257 for bytes, too few
 * tokens for one sample. -ERROR_FAILED: I/O errors, a full cache directory. Pairs with
 * data_close().
 */
int data_open(struct data **d, const struct data_config *config, data_progress_fn *progress,
              void *progress_arg);

void data_close(struct data *d);

/* Samples in an epoch of the set. Training: at least 1. Validation: 0 when there is none. */
uint64_t data_samples(const struct data *d, enum data_set set);

/*
 * Fills `sample` with sample number q (counted over all epochs) of the set, which is not empty.
 * -ERROR_FAILED: read error, or a source that changed since data_open (named).
 */
int data_read_sample(struct data *d, enum data_set set, uint64_t q, struct data_sample *sample);

/*
 * Writes a few lines for the person who started the run: per set the files, the format, documents,
 * tokens, samples and what is dropped. Returns the length without the final NUL, as snprintf does.
 */
size_t data_describe(const struct data *d, char *text, size_t capacity);

/*
 * xxh3-128 over everything that decides which tokens sample q of DATA_TRAIN holds: contents of the
 * sources in order, format, tokenizer, seq_len, packing, overlong, shuffle, val_fraction, eos,
 * seed. Of a token file its words count, not what they were made of. Not paths or times, nor
 * validation files, which a run may change.
 */
void data_fingerprint(const struct data *d, uint64_t hash[2]);

#endif
