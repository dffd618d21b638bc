#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io_worker/data_source.h"
#include "model/jsonl.h"
#include "model/tokenizer_bytes.h"
#include "procs/check.h"
#include "procs/error.h"

/*
 * Text to tokens, in one pass and in bounded memory: a chunk of the source, a chunk of tokens, and
 * for .jsonl the line that is being put together.
 *
 * Bytes are kept as they are: a byte order mark in a .txt, CR LF, NUL. In a .jsonl file a byte
 * order mark before the first line is skipped (RFC 8259, section 8.1), blank lines and empty texts
 * are skipped and counted.
 */

#define TOKENS_CHUNK     4096u
#define LINE_BYTES_FIRST ((size_t)64 << 10)
#define UTF8_MARK        "\xef\xbb\xbf"
#define UTF8_MARK_BYTES  3u

struct tokenizing {
    const struct data_source *source;
    struct data_cache_header *header;
    struct data_cache_writer writer;
    struct utf8_check utf8;
    /* .jsonl */
    char *line;
    size_t used, capacity;
    uint64_t number; /* of the line, from 1 */
};

static int append_bytes(struct tokenizing *t, const char *bytes, size_t n)
{
    uint16_t tokens[TOKENS_CHUNK];
    for (size_t i = 0; i < n; i += TOKENS_CHUNK) {
        size_t k = n - i < TOKENS_CHUNK ? n - i : TOKENS_CHUNK;
        tokenizer_bytes_encode(bytes + i, k, tokens);
        if (data_cache_append(&t->writer, tokens, k * sizeof *tokens) < 0)
            return -(int)error_kind_now();
    }
    t->header->tokens += n;
    return 0;
}

static int end_document(struct tokenizing *t)
{
    const uint16_t end = TOKENIZER_BYTES_END;
    t->header->tokens++;
    t->header->documents++;
    return data_cache_append(&t->writer, &end, sizeof end);
}

static int utf8_error(const struct tokenizing *t)
{
    (void)error_set(ERROR_USER, "%s: not valid UTF-8 at byte offset %" PRIu64, t->source->path,
                    t->utf8.bad_offset);
    return error_hint("convert the file first, for example with iconv -t UTF-8");
}

static int line_error(const struct tokenizing *t)
{
    return error_wrap("%s:%" PRIu64, t->source->path, t->number);
}

static int is_blank(const char *line, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r')
            return 0;
    return 1;
}

static int end_line(struct tokenizing *t)
{
    struct jsonl_text *document;
    const char *line = t->line;
    size_t n = t->used;
    t->used = 0;
    if (t->number == 1 && n >= UTF8_MARK_BYTES && memcmp(line, UTF8_MARK, UTF8_MARK_BYTES) == 0) {
        line += UTF8_MARK_BYTES;
        n -= UTF8_MARK_BYTES;
    }
    if (is_blank(line, n)) {
        t->header->skipped++;
        return 0;
    }
    if (jsonl_text_parse(line, n, &document) < 0)
        return line_error(t);
    const char *text = jsonl_text_bytes(document, &n);
    int rc = 0;
    if (n == 0)
        t->header->skipped++;
    else if (append_bytes(t, text, n) < 0 || end_document(t) < 0)
        rc = -(int)error_kind_now();
    jsonl_text_free(document);
    return rc;
}

static int extend_line(struct tokenizing *t, const char *bytes, size_t n)
{
    if (n > JSONL_LINE_BYTES_MAX - t->used) {
        (void)error_set(ERROR_USER, "the line is longer than %zu bytes", JSONL_LINE_BYTES_MAX);
        (void)error_hint("split the document into several lines, or make it a .txt file");
        return line_error(t);
    }
    if (n == 0)
        return 0;
    while (t->used + n > t->capacity) {
        t->capacity = t->capacity ? 2 * t->capacity : LINE_BYTES_FIRST;
        t->line = realloc(t->line, t->capacity);
        CHECK(t->line != NULL);
    }
    memcpy(t->line + t->used, bytes, n);
    t->used += n;
    return 0;
}

static int feed_lines(struct tokenizing *t, const char *bytes, size_t n)
{
    while (n > 0) {
        const char *newline = memchr(bytes, '\n', n);
        size_t k = newline ? (size_t)(newline - bytes) : n;
        if (extend_line(t, bytes, k) < 0)
            return -(int)error_kind_now();
        if (newline == NULL)
            return 0;
        if (end_line(t) < 0)
            return -(int)error_kind_now();
        t->number++;
        bytes += k + 1;
        n -= k + 1;
    }
    return 0;
}

/* Names the line as well: in a .jsonl file that is what an editor can go to. */
static int jsonl_utf8_error(struct tokenizing *t, const uint8_t *chunk, uint64_t chunk_offset)
{
    uint64_t bad = t->utf8.bad_offset > chunk_offset ? t->utf8.bad_offset - chunk_offset : 0;
    for (uint64_t i = 0; i < bad; i++)
        t->number += chunk[i] == '\n';
    (void)error_set(ERROR_USER, "not valid UTF-8 at byte offset %" PRIu64 " of the file",
                    t->utf8.bad_offset);
    (void)error_hint("convert the file first, for example with iconv -t UTF-8");
    return line_error(t);
}

static int feed(struct tokenizing *t, const uint8_t *chunk, size_t n)
{
    uint64_t chunk_offset = t->utf8.offset;
    int lines = t->source->kind == SOURCE_JSONL;
    if (utf8_check_feed(&t->utf8, chunk, n) < 0)
        return lines ? jsonl_utf8_error(t, chunk, chunk_offset) : utf8_error(t);
    return lines ? feed_lines(t, (const char *)chunk, n) : append_bytes(t, (const char *)chunk, n);
}

static int end_source(struct tokenizing *t)
{
    if (utf8_check_end(&t->utf8) < 0)
        return utf8_error(t);
    if (t->source->kind == SOURCE_TEXT)
        return end_document(t);
    if (t->used > 0 && end_line(t) < 0) /* the last line may lack its newline */
        return -(int)error_kind_now();
    if (t->header->documents == 0)
        return error_set(ERROR_USER,
                         "%s: no document in it: %" PRIu64 " blank lines or empty texts",
                         t->source->path, t->header->skipped);
    return 0;
}

int data_text_tokenize(const struct data_source *source, int fd, const char *path,
                       const struct data_reading *reading, struct data_cache_header *header)
{
    struct tokenizing t = {.source = source, .header = header, .number = 1};
    struct data_stream s;
    int rc = data_cache_begin(&t.writer, path);
    if (rc < 0)
        return rc;
    data_stream_begin(&s, source->path, fd, reading);
    while (rc == 0 && s.offset < s.size) {
        int64_t n = data_stream_next(&s);
        rc = n < 0 ? (int)n : feed(&t, s.chunk, (size_t)n);
    }
    if (rc == 0)
        rc = end_source(&t);
    data_stream_end(&s, header->source_hash);
    if (rc == 0)
        rc = data_source_unchanged(source, fd, &header->source);
    header->kind = DATA_CACHE_TEXT;
    header->token_max = TOKENIZER_BYTES_END;
    if (rc == 0)
        rc = data_cache_finish(&t.writer, header);
    data_cache_abandon(&t.writer);
    free(t.line);
    return rc;
}
