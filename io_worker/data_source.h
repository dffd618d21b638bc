/*
 * One source file of the data set: what it is, and where its tokens lie.
 */
#ifndef IO_WORKER_DATA_SOURCE_H
#define IO_WORKER_DATA_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "io_worker/data.h"
#include "io_worker/data_cache.h"
#include "model/token_file.h"

enum data_source_kind {
    SOURCE_TEXT,     /* the file is one document */
    SOURCE_JSONL,    /* {"text": "..."} a line, one document each; blank lines are skipped */
    SOURCE_LLMC_U16, /* llm.c: 256 x i32 header, magic 20240520, version 1, u16 tokens */
    SOURCE_LLMC_U32, /* llm.c: the same, magic 20240801, version 7, u32 tokens */
    SOURCE_NANOGPT,  /* u16 tokens, nothing else */
    SOURCE_TOKENS,   /* a token file (model/token_file.h): what tools/tokenizer made of a text */
};

struct data_source {
    char *path;
    enum data_source_kind kind;
    char *token_path;                     /* the shard itself, or the text's file in the cache */
    struct data_identity tokens_identity; /* of token_path, checked when it is opened again */
    uint64_t token_offset;                /* bytes, of the first token in token_path */
    uint32_t token_bytes; /* 2 or 4, unsigned, little endian; 4 with flags in a token file */
    uint64_t tokens;
    uint64_t documents;
    uint64_t skipped; /* blank lines and empty texts */
    uint64_t hash[2]; /* xxh3-128 of the source's bytes; of a token file's words */

    char *checks_path; /* the cache file that has the checks of the tokens, at this offset */
    uint64_t checks_offset;

    struct token_file_header token_file; /* SOURCE_TOKENS */

    /* of samples that are not cut out of the stream: the file of documents (data_index.h) */
    char *index_path;
    struct data_identity index_identity;
    uint64_t index_entries;
    uint64_t pieces;      /* samples */
    uint64_t unlearnable; /* documents in which there is nothing to predict */
    uint64_t overlong;    /* conversations longer than a sample */
};

/* What reading a source needs to know; strings are the caller's. */
struct data_reading {
    const char *cache_dir;
    uint64_t vocab_size;
    int64_t eos_id;
    uint64_t seq_len;
    bool pack_whole; /* documents are packed into samples, but not cut by them */
    bool drop_overlong;
    data_progress_fn *progress; /* NULL: none */
    void *progress_arg;
};

static inline bool data_source_is_text(enum data_source_kind kind)
{
    return kind == SOURCE_TEXT || kind == SOURCE_JSONL;
}

/* Token shards are made elsewhere: where a sample ends, the next one's first token is its label. */
static inline bool data_source_is_shard(enum data_source_kind kind)
{
    return !data_source_is_text(kind) && kind != SOURCE_TOKENS;
}

/* Conversations: a sample holds whole ones. */
static inline bool data_source_is_instruction(const struct data_source *source)
{
    return source->kind == SOURCE_TOKENS && source->token_file.kind == TOKEN_FILE_INSTRUCTION;
}

const char *data_source_kind_name(enum data_source_kind kind);

/* What the file is, by `format`, its name and its first bytes. -ERROR_USER. */
int data_source_detect(const char *path, enum data_format format, enum data_source_kind *kind);

/*
 * Fills all of `source` except the index; source->path and ->kind are set. Scans a shard, tokenizes
 * a text, unless the cache has it. Errors as data_open(). Pairs with data_source_close(), on error
 * too.
 */
int data_source_open(struct data_source *source, const struct data_reading *reading);

void data_source_close(struct data_source *source);

/* The checks of this source's tokens: source->checks_path, open for reading. -ERROR_FAILED. */
int data_source_open_checks(const struct data_source *source);

struct data_source_files {
    int fd, checks_fd; /* of token_path and checks_path, open for reading */
};

/* Tokens [start, start + n) as they lie in the file, compared with their checks. -ERROR_FAILED. */
int data_source_read(const struct data_source *source, const struct data_source_files *files,
                     uint64_t start, uint64_t n, uint8_t *raw);

/* Whether the file open at fd is still what it was `before` it was read. -ERROR_FAILED if not. */
int data_source_unchanged(const struct data_source *source, int fd,
                          const struct data_identity *before);

/* Tokenizes a text source (open at fd) into the cache file `path`; fills the header. data_text.c */
int data_text_tokenize(const struct data_source *source, int fd, const char *path,
                       const struct data_reading *reading, struct data_cache_header *header);

/* A source file read from front to back in chunks, hashed on the way. */
struct data_stream {
    const char *path;
    int fd;
    uint64_t offset, size; /* bytes given out so far, and in all */
    uint64_t unhashed;     /* bytes at the front that the hash leaves out */
    uint8_t *chunk;        /* (DATA_STREAM_BYTES) */
    const struct data_reading *reading;
    struct XXH3_state_s *hash;
};

#define DATA_STREAM_BYTES ((size_t)1 << 20)

void data_stream_begin(struct data_stream *s, const char *path, int fd,
                       const struct data_reading *reading);
/* Bytes in s->chunk, 0 at the end. Chunks are full but for the last. -ERROR_FAILED, -ERROR_STOPPED.
 */
int64_t data_stream_next(struct data_stream *s);
void data_stream_end(struct data_stream *s, uint64_t hash[2]);

/* Opens a regular file that is not empty. -ERROR_USER. */
int data_file_open(const char *path, int *fd, struct stat *status);

/* Reads exactly n bytes at offset. -ERROR_FAILED; a file that ends early is an error. */
int data_file_read(int fd, const char *path, void *bytes, size_t n, uint64_t offset);

#endif
