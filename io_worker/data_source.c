#include "io_worker/data_source.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "model/tokenizer_bytes.h"
#include "procs/check.h"
#include "procs/error.h"

/*
 * Token shards, as their makers define them: github.com/karpathy/llm.c, dev/data/data_common.py
 * (HEADERS_INFO, write_datafile) and llmc/dataloader.h; github.com/karpathy/nanoGPT,
 * data/openwebtext/prepare.py (a memmap of uint16).
 */
#define LLMC_HEADER_BYTES   1024u
#define LLMC_MAGIC_U16      20240520
#define LLMC_MAGIC_EVAL     20240522
#define LLMC_MAGIC_U32      20240801
#define LLMC_VERSION_U16    1
#define LLMC_VERSION_U32    7
#define NANOGPT_TOKEN_BYTES 2u

static const struct {
    const char *name;
    uint32_t token_bytes;
    uint32_t header_bytes;
} kinds[] = {
    [SOURCE_TEXT] = {"text, one document per file", 2, DATA_CACHE_HEADER_BYTES},
    [SOURCE_JSONL] = {"text, one document per line (jsonl)", 2, DATA_CACHE_HEADER_BYTES},
    [SOURCE_LLMC_U16] = {"token shards of llm.c (uint16)", 2, LLMC_HEADER_BYTES},
    [SOURCE_LLMC_U32] = {"token shards of llm.c (uint32)", 4, LLMC_HEADER_BYTES},
    [SOURCE_NANOGPT] = {"token shards of nanoGPT (uint16)", NANOGPT_TOKEN_BYTES, 0},
    [SOURCE_TOKENS] = {"tokenized", TOKEN_FILE_WORD_BYTES, TOKEN_FILE_HEADER_BYTES},
};

const char *data_source_kind_name(enum data_source_kind kind)
{
    return kinds[kind].name;
}

int data_file_open(const char *path, int *fd, struct stat *status)
{
    int rc = 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang the start */
    if (*fd < 0)
        return error_set(ERROR_USER, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(*fd, status) < 0)
        rc = error_set(ERROR_FAILED, "%s: cannot stat: %s", path, strerror(errno));
    else if (!S_ISREG(status->st_mode))
        rc = error_set(ERROR_USER, "%s: expected a regular file, found %s", path,
                       S_ISDIR(status->st_mode) ? "a directory" : "a special file");
    else if (status->st_size == 0)
        rc = error_set(ERROR_USER, "%s: the file is empty, expected training data", path);
    if (rc < 0) {
        (void)close(*fd); /* opened for reading */
        *fd = -1;
    }
    return rc;
}

int data_file_read(int fd, const char *path, void *bytes, size_t n, uint64_t offset)
{
    uint8_t *b = bytes;
    for (size_t done = 0; done < n;) {
        ssize_t k = pread(fd, b + done, n - done, (off_t)(offset + done));
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return error_set(ERROR_FAILED, "%s: read at offset %" PRIu64 ": %s", path,
                             offset + done, strerror(errno));
        if (k == 0)
            return error_set(ERROR_FAILED,
                             "%s: the file ends at offset %" PRIu64 ", expected %zu bytes more; it "
                             "was cut while it was in use",
                             path, offset + done, n - done);
        done += (size_t)k;
    }
    return 0;
}

static int ends_with(const char *path, const char *suffix)
{
    size_t n = strlen(path), m = strlen(suffix);
    return n >= m && strcmp(path + n - m, suffix) == 0;
}

/* An llm.c shard and a token file have magic numbers; what has none is nanoGPT's, which is nothing
 * but tokens. */
static int detect_shard(const char *path, enum data_source_kind *kind)
{
    int32_t header[2] = {0, 0};
    struct stat status;
    int fd;
    if (data_file_open(path, &fd, &status) < 0)
        return -(int)error_kind_now();
    int rc = 0;
    if ((uint64_t)status.st_size >= sizeof header)
        rc = data_file_read(fd, path, header, sizeof header, 0);
    (void)close(fd); /* opened for reading */
    if (rc < 0)
        return rc;
    int32_t version = 0;
    *kind = SOURCE_NANOGPT;
    if (ends_with(path, TOKEN_FILE_SUFFIX) ||
        memcmp(header, TOKEN_FILE_MAGIC, sizeof header) == 0) {
        *kind = SOURCE_TOKENS;
        return 0;
    }
    if (header[0] == LLMC_MAGIC_EVAL)
        return error_set(ERROR_USER,
                         "%s: an llm.c file of multiple-choice questions (magic %d), expected "
                         "tokens (magic %d or %d)",
                         path, LLMC_MAGIC_EVAL, LLMC_MAGIC_U16, LLMC_MAGIC_U32);
    if (header[0] == LLMC_MAGIC_U16) {
        *kind = SOURCE_LLMC_U16;
        version = LLMC_VERSION_U16;
    } else if (header[0] == LLMC_MAGIC_U32) {
        *kind = SOURCE_LLMC_U32;
        version = LLMC_VERSION_U32;
    }
    if (*kind != SOURCE_NANOGPT && header[1] != version)
        return error_set(ERROR_USER,
                         "%s: llm.c token shard with magic %d: expected version %d, found %d", path,
                         header[0], version, header[1]);
    return 0;
}

int data_source_detect(const char *path, enum data_format format, enum data_source_kind *kind)
{
    int text = ends_with(path, ".txt"), lines = ends_with(path, ".jsonl");
    if (ends_with(path, ".parquet")) {
        (void)error_set(ERROR_USER, "%s: Parquet is read when a tokenizer.json tokenizes it", path);
        return error_hint("set model.tokenizer to a tokenizer.json, or convert it to .jsonl");
    }
    if (format == DATA_FORMAT_TEXT || (format == DATA_FORMAT_AUTO && (text || lines))) {
        *kind = lines ? SOURCE_JSONL : SOURCE_TEXT;
        return 0;
    }
    if (format == DATA_FORMAT_TOKENS && (text || lines))
        return error_set(ERROR_USER, "%s: data.format = \"tokens\", but the name says text", path);
    if (format == DATA_FORMAT_TOKENS || ends_with(path, ".bin") ||
        ends_with(path, TOKEN_FILE_SUFFIX))
        return detect_shard(path, kind);
    (void)error_set(ERROR_USER,
                    "%s: cannot tell the format from the name: expected .txt, .jsonl, .parquet or "
                    ".bin",
                    path);
    return error_hint("say it with data.format = \"text\" or \"tokens\"; .parquet needs a "
                      "tokenizer.json");
}

void data_stream_begin(struct data_stream *s, const char *path, int fd,
                       const struct data_reading *reading)
{
    struct stat status;
    *s = (struct data_stream){.path = path, .fd = fd, .reading = reading};
    s->chunk = malloc(DATA_STREAM_BYTES);
    s->hash = XXH3_createState();
    CHECK(s->chunk != NULL && s->hash != NULL && XXH3_128bits_reset(s->hash) == XXH_OK);
    CHECK(fstat(fd, &status) == 0); /* an open file */
    s->size = (uint64_t)status.st_size;
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* advice only */
}

int64_t data_stream_next(struct data_stream *s)
{
    uint64_t left = s->size - s->offset;
    size_t n = left < DATA_STREAM_BYTES ? (size_t)left : DATA_STREAM_BYTES;
    if (data_file_read(s->fd, s->path, s->chunk, n, s->offset) < 0)
        return -(int)error_kind_now();
    size_t skip = s->offset >= s->unhashed ? 0 : (size_t)(s->unhashed - s->offset);
    if (skip < n)
        CHECK(XXH3_128bits_update(s->hash, s->chunk + skip, n - skip) == XXH_OK);
    s->offset += n;
    const struct data_reading *r = s->reading;
    if (r->progress != NULL && r->progress(r->progress_arg, s->path, s->offset, s->size) != 0)
        return error_set(ERROR_STOPPED, "%s: stopped while reading", s->path);
    return (int64_t)n;
}

void data_stream_end(struct data_stream *s, uint64_t hash[2])
{
    XXH128_hash_t h = XXH3_128bits_digest(s->hash);
    hash[0] = h.low64;
    hash[1] = h.high64;
    (void)XXH3_freeState(s->hash); /* cannot fail */
    free(s->chunk);
    *s = (struct data_stream){0};
}

/* The shard's size must be what its header says, to the byte: a download that stopped is not data.
 */
static int check_shard_size(struct data_source *source, int fd, uint64_t size)
{
    uint64_t body = size;
    source->token_bytes = kinds[source->kind].token_bytes;
    source->token_offset = kinds[source->kind].header_bytes;
    if (source->kind == SOURCE_NANOGPT) {
        if (size % NANOGPT_TOKEN_BYTES != 0)
            return error_set(ERROR_USER,
                             "%s: expected uint16 tokens without a header (nanoGPT), found an odd "
                             "number of bytes, %" PRIu64,
                             source->path, size);
    } else {
        int32_t header[3];
        if (size < LLMC_HEADER_BYTES)
            return error_set(ERROR_USER,
                             "%s: llm.c token shard: expected a header of %u bytes, the file has "
                             "%" PRIu64,
                             source->path, LLMC_HEADER_BYTES, size);
        if (data_file_read(fd, source->path, header, sizeof header, 0) < 0)
            return -(int)error_kind_now();
        if (header[2] < 1)
            return error_set(
                ERROR_USER, "%s: llm.c token shard: the header says %d tokens, expected at least 1",
                source->path, header[2]);
        body = (uint64_t)header[2] * source->token_bytes;
        if (size != LLMC_HEADER_BYTES + body)
            return error_set(ERROR_USER,
                             "%s: llm.c token shard: the header says %d tokens (a file of %" PRIu64
                             " bytes), found %" PRIu64 " bytes",
                             source->path, header[2], LLMC_HEADER_BYTES + body, size);
    }
    source->tokens = body / source->token_bytes;
    return 0;
}

static int check_token_file(struct data_source *source, int fd, uint64_t size)
{
    memset(&source->token_file, 0, sizeof source->token_file);
    size_t n = size < sizeof source->token_file ? (size_t)size : sizeof source->token_file;
    if (data_file_read(fd, source->path, &source->token_file, n, 0) < 0)
        return -(int)error_kind_now();
    if (token_file_check(&source->token_file, size) < 0)
        return error_wrap("%s", source->path);
    source->tokens = source->token_file.tokens;
    return 0;
}

static uint32_t token_at(const uint8_t *tokens, uint32_t token_bytes, size_t i)
{
    if (token_bytes == 2) {
        uint16_t t;
        memcpy(&t, tokens + 2 * i, sizeof t);
        return t;
    }
    uint32_t t;
    memcpy(&t, tokens + 4 * i, sizeof t);
    return t;
}

/* `first`: number of the token at tokens[0]. Updates documents, token_max and `open_document`. */
static int scan_tokens(const struct data_source *source, const struct data_reading *reading,
                       const uint8_t *tokens, size_t n, struct data_cache_header *header)
{
    uint64_t first = header->tokens;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = token_at(tokens, source->token_bytes, i);
        if (source->kind == SOURCE_TOKENS) {
            header->documents += (id & TOKEN_FILE_END) != 0;
            id &= TOKEN_FILE_ID;
        } else {
            header->documents += (int64_t)id == reading->eos_id;
        }
        if (id >= reading->vocab_size) {
            (void)error_set(ERROR_USER,
                            "%s: token %" PRIu64 " (byte offset %" PRIu64 ") has id %u, expected "
                            "less than the model's vocab_size = %" PRIu64,
                            source->path, first + i,
                            source->token_offset + (first + i) * source->token_bytes, id,
                            reading->vocab_size);
            return error_hint("the shard was made with another tokenizer, or is no token shard");
        }
        if (id > header->token_max)
            header->token_max = id;
    }
    header->tokens += n;
    return 0;
}

/* The end of a shard ends its last document. */
static int end_shard(const struct data_reading *reading, uint32_t last,
                     struct data_cache_header *header)
{
    header->documents += (int64_t)last != reading->eos_id;
    return 0;
}

/* In a token file that stands there; and its words are those that were written. */
static int end_token_file(const struct data_source *source, uint32_t crc, uint32_t last,
                          const struct data_cache_header *header)
{
    if (crc != source->token_file.words_checksum) {
        (void)error_set(ERROR_USER, "%s: damaged: checksum of the words: expected %08x, found %08x",
                        source->path, source->token_file.words_checksum, crc);
        return error_hint("remove it; the next start, or `mtlaunch tokenize`, makes it again");
    }
    if ((last & TOKEN_FILE_END) && header->documents == source->token_file.documents)
        return 0;
    return error_set(ERROR_USER,
                     "%s: damaged: expected %" PRIu64 " documents and the end of one at the end, "
                     "found %" PRIu64 " ends",
                     source->path, source->token_file.documents, header->documents);
}

/* Reads the whole shard once: every id is checked before the first step. */
static int scan_shard(const struct data_source *source, int fd, const struct data_reading *reading,
                      struct data_cache_header *header, struct data_checks *checks)
{
    struct data_stream s;
    int64_t n;
    int rc = 0;
    uint32_t last = 0, crc = 0;
    data_stream_begin(&s, source->path, fd, reading);
    s.unhashed = source->kind == SOURCE_TOKENS ? TOKEN_FILE_HEADER_BYTES : 0;
    size_t skip = source->token_offset; /* the header lies in the first chunk */
    while (rc == 0 && s.offset < s.size) {
        n = data_stream_next(&s);
        if (n < 0) {
            rc = (int)n;
            break;
        }
        size_t count = ((size_t)n - skip) / source->token_bytes;
        rc = scan_tokens(source, reading, s.chunk + skip, count, header);
        data_checks_feed(checks, s.chunk + skip, count * source->token_bytes);
        if (source->kind == SOURCE_TOKENS)
            crc = token_file_crc(crc, s.chunk + skip, count * source->token_bytes);
        if (count > 0)
            last = token_at(s.chunk + skip, source->token_bytes, count - 1);
        skip = 0;
    }
    if (rc == 0)
        rc = source->kind == SOURCE_TOKENS ? end_token_file(source, crc, last, header)
                                           : end_shard(reading, last, header);
    data_stream_end(&s, header->source_hash);
    return rc;
}

static void header_begin(struct data_cache_header *header, const struct data_source *source,
                         const struct data_identity *identity, const struct data_reading *reading)
{
    size_t n = strlen(source->path), room = sizeof header->source_name - 1;
    *header = (struct data_cache_header){.source_kind = source->kind,
                                         .token_bytes = kinds[source->kind].token_bytes,
                                         .eos_id = reading->eos_id,
                                         .source = *identity};
    memcpy(header->source_name, source->path + (n > room ? n - room : 0), n > room ? room : n);
    memcpy(header->tokenizer, TOKENIZER_BYTES_NAME, sizeof TOKENIZER_BYTES_NAME);
}

int data_source_unchanged(const struct data_source *source, int fd,
                          const struct data_identity *before)
{
    struct stat status;
    if (fstat(fd, &status) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", source->path, strerror(errno));
    struct data_identity after = data_identity_of(&status);
    if (after.size != before->size || after.mtime_ns != before->mtime_ns)
        return error_set(ERROR_FAILED, "%s: the file changed while it was read", source->path);
    return 0;
}

static int hash_source(const struct data_source *source, int fd, const struct data_reading *reading,
                       uint64_t hash[2])
{
    struct data_stream s;
    int64_t n = 1;
    data_stream_begin(&s, source->path, fd, reading);
    s.unhashed = source->kind == SOURCE_TOKENS ? TOKEN_FILE_HEADER_BYTES : 0;
    while (n > 0 && s.offset < s.size)
        n = data_stream_next(&s);
    data_stream_end(&s, hash);
    return n < 0 ? (int)n : 0;
}

/* 1: the header at `path` holds for the source as it is now. */
static int cache_holds(const struct data_source *source, int fd, const char *path,
                       const struct data_reading *reading, struct data_cache_header *want)
{
    struct data_cache_header found;
    uint64_t hash[2];
    enum data_cache_kind kind =
        data_source_is_text(source->kind) ? DATA_CACHE_TEXT : DATA_CACHE_SCAN;
    if (!data_cache_load(path, kind, &found) || found.source_kind != want->source_kind ||
        found.eos_id != want->eos_id || found.token_max >= reading->vocab_size ||
        memcmp(found.tokenizer, want->tokenizer, sizeof found.tokenizer) != 0)
        return 0;
    if (!data_cache_matches(&found, &want->source)) {
        if (found.source.size != want->source.size)
            return 0;
        int rc = hash_source(source, fd, reading, hash);
        if (rc < 0)
            return rc;
        if (memcmp(hash, found.source_hash, sizeof hash) != 0)
            return 0;
        found.source = want->source;
        data_cache_renew(path, &found);
    }
    *want = found;
    return 1;
}

static int read_source(const struct data_source *source, int fd, const char *path,
                       const struct data_reading *reading, struct data_cache_header *header)
{
    struct data_cache_writer w;
    struct data_checks checks = {0};
    if (data_source_is_text(source->kind))
        return data_text_tokenize(source, fd, path, reading, header);
    if (scan_shard(source, fd, reading, header, &checks) < 0 ||
        data_source_unchanged(source, fd, &header->source) < 0 || data_cache_begin(&w, path) < 0) {
        data_checks_free(&checks);
        return -(int)error_kind_now();
    }
    w.checks = checks; /* the writer's now */
    header->kind = DATA_CACHE_SCAN;
    return data_cache_finish(&w, header);
}

static int identify_tokens(struct data_source *source)
{
    struct stat status;
    if (stat(source->token_path, &status) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", source->token_path, strerror(errno));
    source->tokens_identity = data_identity_of(&status);
    return 0;
}

static int open_tokens(struct data_source *source, int fd, const struct data_identity *identity,
                       const struct data_reading *reading)
{
    struct data_cache_header header;
    int text = data_source_is_text(source->kind);
    char *path = data_cache_path(reading->cache_dir, source->path, text ? "tokens" : "scan");
    header_begin(&header, source, identity, reading);
    int rc = cache_holds(source, fd, path, reading, &header);
    if (rc == 0)
        rc = read_source(source, fd, path, reading, &header);
    if (rc >= 0) {
        source->tokens = header.tokens;
        source->documents = header.documents;
        source->skipped =
            source->kind == SOURCE_TOKENS ? source->token_file.skipped : header.skipped;
        memcpy(source->hash, header.source_hash, sizeof source->hash);
        source->checks_offset = data_cache_checks_offset(&header);
        source->token_path = strdup(text ? path : source->path);
        CHECK(source->token_path != NULL);
        rc = identify_tokens(source);
    }
    source->checks_path = path;
    return rc;
}

int data_source_open(struct data_source *source, const struct data_reading *reading)
{
    struct stat status;
    int fd;
    if (data_file_open(source->path, &fd, &status) < 0)
        return -(int)error_kind_now();
    struct data_identity identity = data_identity_of(&status);
    int rc = 0;
    source->token_bytes = kinds[source->kind].token_bytes;
    source->token_offset = kinds[source->kind].header_bytes;
    if (source->kind == SOURCE_TOKENS)
        rc = check_token_file(source, fd, identity.size);
    else if (!data_source_is_text(source->kind))
        rc = check_shard_size(source, fd, identity.size);
    if (rc == 0)
        rc = open_tokens(source, fd, &identity, reading);
    (void)close(fd); /* opened for reading */
    return rc;
}

void data_source_close(struct data_source *source)
{
    free(source->path);
    free(source->token_path);
    free(source->index_path);
    free(source->checks_path);
    *source = (struct data_source){0};
}

/* Another run may have put a newer file there: of the same bytes the checks are the same. */
int data_source_open_checks(const struct data_source *source)
{
    struct data_cache_header header;
    enum data_cache_kind kind =
        data_source_is_text(source->kind) ? DATA_CACHE_TEXT : DATA_CACHE_SCAN;
    int fd = data_cache_open(source->checks_path, kind, &header);
    if (fd >= 0 && header.tokens == source->tokens && header.token_bytes == source->token_bytes &&
        memcmp(header.source_hash, source->hash, sizeof header.source_hash) == 0)
        return fd;
    if (fd >= 0)
        (void)close(fd); /* opened for reading */
    return error_set(ERROR_FAILED, "%s: the file changed since the run started",
                     source->checks_path);
}

int data_source_read(const struct data_source *source, const struct data_source_files *files,
                     uint64_t start, uint64_t n, uint8_t *raw)
{
    struct data_checked f = {.path = source->token_path,
                             .fd = files->fd,
                             .base = source->token_offset,
                             .bytes = source->tokens * source->token_bytes,
                             .checks_path = source->checks_path,
                             .checks_fd = files->checks_fd,
                             .checks_offset = source->checks_offset};
    return data_checked_read(&f, raw, n * source->token_bytes, start * source->token_bytes);
}
