/*
 * The documents of a source, for samples that are not cut out of the stream: each sample one
 * document (packing = false), or whole documents packed (instruction data).
 *
 * A cache file (data_cache.h) of entries {start, end, first}, in order: tokens [start, end) are cut
 * every seq_len into samples, which are numbered from `first` in the source. A sample's entry is
 * found by binary search in the file, so the index may be larger than memory.
 *
 * One document each: an entry per document that makes at least one sample. A document of n tokens
 * makes ceil((n - 1) / seq_len) samples when a sample sees the token after its last one (shards),
 * else ceil(n / seq_len) (text), less a last one of a single token: there is nothing to predict in
 * it. A conversation is never cut in two: it makes one sample, of its first seq_len tokens if it is
 * longer (or none, as configured). One without a label among these makes none.
 *
 * Packed: an entry per sample. Documents are taken in order; one that does not fit into what the
 * sample before it has left begins the next (next-fit). Texts longer than a sample are cut first.
 */
#ifndef IO_WORKER_DATA_INDEX_H
#define IO_WORKER_DATA_INDEX_H

#include <stdint.h>

#include "io_worker/data_source.h"

struct data_piece {
    uint64_t start; /* first token of the sample in its source */
    uint64_t end;   /* end of its document */
};

/* Makes or reuses the index of an opened source; fills its index fields. Errors as data_open(). */
int data_index_open(struct data_source *source, const struct data_reading *reading);

/* Finds sample `number` < source->pieces. fd: source->index_path, open for reading. */
int data_index_find(const struct data_source *source, int fd, uint64_t number, uint64_t seq_len,
                    struct data_piece *piece);

/* Samples that a document of n tokens makes. */
uint64_t data_index_pieces(enum data_source_kind kind, uint64_t n, uint64_t seq_len);

/* Widens n tokens as they lie in the source to i32. */
void data_tokens_widen(const uint8_t *raw, uint32_t token_bytes, uint64_t n, int32_t *tokens);

#endif
