#include "io_worker/data_index.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/tokenizer_bytes.h"
#include "procs/check.h"
#include "procs/error.h"

#define ENTRY_BYTES       24u
#define INDEX_TOKENS_READ 65536u

struct entry {
    uint64_t start, end, first;
};
_Static_assert(sizeof(struct entry) == ENTRY_BYTES, "on-disk layout");

uint64_t data_index_pieces(enum data_source_kind kind, uint64_t n, uint64_t seq_len)
{
    if (n < 2)
        return 0;
    if (data_source_is_shard(kind))
        return (n - 2) / seq_len + 1;
    return n / seq_len + (n % seq_len > 1);
}

void data_tokens_widen(const uint8_t *raw, uint32_t token_bytes, uint64_t n, int32_t *tokens)
{
    for (uint64_t i = 0; i < n; i++) {
        if (token_bytes == 2) {
            uint16_t t;
            memcpy(&t, raw + 2 * i, sizeof t);
            tokens[i] = t;
        } else {
            memcpy(&tokens[i], raw + 4 * i, sizeof tokens[i]);
        }
    }
}

struct indexing {
    const struct data_source *source;
    const struct data_reading *reading;
    uint64_t seq_len;
    uint64_t start;                    /* of the document that is being read */
    uint64_t labels;                   /* of it, among its first seq_len tokens */
    uint64_t packed_start, packed_end; /* the sample that is being packed; equal: none */
    struct data_cache_header *header;
    struct data_cache_writer writer;
};

static int append_entry(struct indexing *x, uint64_t start, uint64_t end, uint64_t pieces)
{
    struct entry e = {start, end, x->header->pieces};
    x->header->pieces += pieces;
    x->header->entries++;
    return data_cache_append(&x->writer, &e, sizeof e);
}

static int end_packed(struct indexing *x)
{
    uint64_t start = x->packed_start, end = x->packed_end;
    x->packed_start = x->packed_end = 0;
    return start < end ? append_entry(x, start, end, 1) : 0;
}

/* Tokens [start, end), at most seq_len of them, stay together. What was left out before them ends a
 * sample, too: its tokens are one range. */
static int pack_one(struct indexing *x, uint64_t start, uint64_t end)
{
    if (start == x->packed_end && end - x->packed_start <= x->seq_len) {
        x->packed_end = end;
        return 0;
    }
    int rc = end_packed(x);
    x->packed_start = start;
    x->packed_end = end;
    return rc;
}

static int pack_text(struct indexing *x, uint64_t start, uint64_t end)
{
    for (; end - start >= 2; start += x->seq_len) {
        uint64_t n = end - start < x->seq_len ? end - start : x->seq_len;
        if (pack_one(x, start, start + n) < 0)
            return -(int)error_kind_now();
        if (n < x->seq_len)
            break;
    }
    return 0;
}

/* How much of a conversation is used: 0 if nothing. */
static uint64_t conversation_tokens(struct indexing *x, uint64_t n)
{
    if (n > x->seq_len) {
        x->header->overlong++;
        if (x->reading->drop_overlong)
            return 0;
        n = x->seq_len;
    }
    if (x->labels == 0)
        x->header->skipped++;
    return x->labels > 0 ? n : 0;
}

static int end_conversation(struct indexing *x, uint64_t start, uint64_t end)
{
    uint64_t n = conversation_tokens(x, end - start);
    if (n == 0)
        return 0;
    return x->reading->pack_whole ? pack_one(x, start, start + n)
                                  : append_entry(x, start, start + n, 1);
}

static int end_document(struct indexing *x, uint64_t end)
{
    uint64_t start = x->start, pieces;
    x->start = end;
    if (data_source_is_instruction(x->source))
        return end_conversation(x, start, end);
    pieces = data_index_pieces(x->source->kind, end - start, x->seq_len);
    if (pieces == 0) {
        x->header->skipped++;
        return 0;
    }
    return x->reading->pack_whole ? pack_text(x, start, end) : append_entry(x, start, end, pieces);
}

/* One word of a token file: is it a label of a sample that begins with its document? */
static int index_word(struct indexing *x, uint64_t at, uint32_t word)
{
    if (at == x->start)
        x->labels = 0;
    else if (!(word & TOKEN_FILE_MASKED) && at - x->start < x->seq_len)
        x->labels++;
    return word & TOKEN_FILE_END ? end_document(x, at + 1) : 0;
}

static int index_chunk(struct indexing *x, uint64_t at, const int32_t *tokens, uint64_t n)
{
    int rc = 0;
    for (uint64_t i = 0; i < n && rc == 0; i++) {
        if (x->source->kind == SOURCE_TOKENS)
            rc = index_word(x, at + i, (uint32_t)tokens[i]);
        else if (tokens[i] == x->reading->eos_id)
            rc = end_document(x, at + i + 1);
    }
    return rc;
}

struct token_buffers {
    uint8_t raw[INDEX_TOKENS_READ * 4];
    int32_t tokens[INDEX_TOKENS_READ];
};

static int index_tokens(struct indexing *x, const struct data_source_files *files,
                        struct token_buffers *b)
{
    const struct data_source *s = x->source;
    const struct data_reading *reading = x->reading;
    for (uint64_t at = 0; at < s->tokens;) {
        uint64_t left = s->tokens - at;
        uint64_t n = left < INDEX_TOKENS_READ ? left : INDEX_TOKENS_READ;
        if (data_source_read(s, files, at, n, b->raw) < 0)
            return -(int)error_kind_now();
        data_tokens_widen(b->raw, s->token_bytes, n, b->tokens);
        if (index_chunk(x, at, b->tokens, n) < 0)
            return -(int)error_kind_now();
        at += n;
        if (reading->progress != NULL &&
            reading->progress(reading->progress_arg, s->path, at, s->tokens) != 0)
            return error_set(ERROR_STOPPED, "%s: stopped while listing documents", s->path);
    }
    if (x->start < s->tokens && end_document(x, s->tokens) < 0)
        return -(int)error_kind_now();
    return end_packed(x);
}

static int write_index(struct data_source *source, const struct data_reading *reading,
                       struct data_cache_header *header)
{
    struct indexing x = {
        .source = source, .reading = reading, .seq_len = reading->seq_len, .header = header};
    struct data_source_files files = {.checks_fd = data_source_open_checks(source)};
    if (files.checks_fd < 0)
        return -(int)error_kind_now();
    files.fd = open(source->token_path, O_RDONLY | O_CLOEXEC);
    if (files.fd < 0) {
        (void)close(files.checks_fd); /* opened for reading */
        return error_set(ERROR_FAILED, "%s: cannot open: %s", source->token_path, strerror(errno));
    }
    struct token_buffers *buffers = malloc(sizeof *buffers);
    CHECK(buffers != NULL);
    int rc = data_cache_begin(&x.writer, source->index_path);
    if (rc == 0)
        rc = index_tokens(&x, &files, buffers);
    if (rc == 0)
        rc = data_cache_finish(&x.writer, header);
    data_cache_abandon(&x.writer);
    free(buffers);
    (void)close(files.fd); /* opened for reading */
    (void)close(files.checks_fd);
    return rc;
}

static int index_holds(const char *path, struct data_cache_header *want)
{
    struct data_cache_header found;
    if (!data_cache_load(path, DATA_CACHE_INDEX, &found) ||
        found.source_kind != want->source_kind || found.eos_id != want->eos_id ||
        found.seq_len != want->seq_len || found.tokens != want->tokens ||
        found.packed != want->packed || found.dropped != want->dropped ||
        memcmp(found.source_hash, want->source_hash, sizeof found.source_hash) != 0 ||
        memcmp(found.tokenizer, want->tokenizer, sizeof found.tokenizer) != 0)
        return 0;
    *want = found;
    return 1;
}

int data_index_open(struct data_source *source, const struct data_reading *reading)
{
    char suffix[48];
    struct stat status;
    struct data_cache_header header = {.kind = DATA_CACHE_INDEX,
                                       .source_kind = source->kind,
                                       .token_bytes = source->token_bytes,
                                       .tokens = source->tokens,
                                       .eos_id = reading->eos_id,
                                       .seq_len = reading->seq_len,
                                       .packed = reading->pack_whole,
                                       .dropped = reading->drop_overlong,
                                       .tokenizer = TOKENIZER_BYTES_NAME};
    memcpy(header.source_hash, source->hash, sizeof header.source_hash);
    (void)snprintf(suffix, sizeof suffix, "%s%s-%llu", reading->pack_whole ? "packed" : "documents",
                   reading->drop_overlong ? "-drop" : "", (unsigned long long)reading->seq_len);
    source->index_path = data_cache_path(reading->cache_dir, source->path, suffix);
    if (!index_holds(source->index_path, &header) && write_index(source, reading, &header) < 0)
        return -(int)error_kind_now();
    if (stat(source->index_path, &status) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", source->index_path, strerror(errno));
    source->index_identity = data_identity_of(&status);
    source->index_entries = header.entries;
    source->pieces = header.pieces;
    source->unlearnable = header.skipped;
    source->overlong = header.overlong;
    return 0;
}

static int read_entry(const struct data_source *source, int fd, uint64_t i, struct entry *e)
{
    return data_file_read(fd, source->index_path, e, sizeof *e,
                          DATA_CACHE_HEADER_BYTES + i * ENTRY_BYTES);
}

/* What was searched for is believed only where the entry found is what was written. */
static int read_checked(const struct data_source *source, int fd, uint64_t i, struct entry *e)
{
    struct data_checked f = {.path = source->index_path,
                             .fd = fd,
                             .base = DATA_CACHE_HEADER_BYTES,
                             .bytes = source->index_entries * ENTRY_BYTES,
                             .checks_path = source->index_path,
                             .checks_fd = fd};
    f.checks_offset = f.base + f.bytes;
    return data_checked_read(&f, e, sizeof *e, i * ENTRY_BYTES);
}

int data_index_find(const struct data_source *source, int fd, uint64_t number, uint64_t seq_len,
                    struct data_piece *piece)
{
    CHECK(number < source->pieces);
    struct entry e;
    uint64_t low = 0, high = source->index_entries; /* the entry wanted is in [low, high) */
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (read_entry(source, fd, middle, &e) < 0)
            return -(int)error_kind_now();
        if (e.first <= number)
            low = middle;
        else
            high = middle;
    }
    if (read_checked(source, fd, low, &e) < 0)
        return -(int)error_kind_now();
    if (e.first > number || e.end > source->tokens || e.start >= e.end ||
        (number - e.first) * seq_len >= e.end - e.start)
        return error_set(ERROR_FAILED, "%s: damaged: entry %llu does not hold sample %llu",
                         source->index_path, (unsigned long long)low, (unsigned long long)number);
    piece->start = e.start + (number - e.first) * seq_len;
    piece->end = e.end;
    return 0;
}
