/*
 * Training data files: token shards of both llm.c kinds and nanoGPT, .jsonl, .txt, and token files
 * (io_worker/data.h, model/token_file.h).
 *
 *     | kind and flags | seq_len | vocabulary | eos | the file's bytes ... |
 *
 * Every sample of what is accepted obeys data.h; a shard's tokens are those that the oracle reads
 * out of the bytes itself; a second opening, from the cache, gives the same.
 */
#include <ftw.h>
#include <stdbool.h>
#include <sys/stat.h>

#include "io_worker/data.h"
#include "model/token_file.h"
#include "model/tokenizer_bytes.h"
#include "tests/fuzz/fuzz.h"

enum { HEAD_BYTES = 8, SEQ_LEN_MAX = 40, SAMPLES_MAX = 64, LLMC_HEADER_BYTES = 1024 };

enum flag {
    FLAG_PACKING = 4,
    FLAG_PARTIAL = 8,
    FLAG_SHUFFLE = 16,
    FLAG_FRACTION = 32,
    FLAG_DROP = 64
};
enum { KINDS = 4 };

static char cache[256], paths[KINDS][256];

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const char *const names[] = {"data.bin", "data.jsonl", "data.txt", "data.mttokens"};
    (void)argc;
    (void)argv;
    fuzz_path(cache, sizeof cache, "cache");
    for (int i = 0; i < KINDS; i++)
        fuzz_path(paths[i], sizeof paths[i], names[i]);
    return 0;
}

static int remove_one(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s;
    (void)type;
    (void)f;
    return remove(path);
}

/* Where the tokens of a shard begin and how wide they are, as their makers say. */
static size_t shard_tokens(const uint8_t *bytes, size_t n, size_t *offset, size_t *width)
{
    int32_t magic = 0;
    if (n >= 2 * sizeof magic) /* else nothing that could be a magic number and a version */
        memcpy(&magic, bytes, sizeof magic);
    *offset = magic == 20240520 || magic == 20240801 ? LLMC_HEADER_BYTES : 0;
    *width = magic == 20240801 ? 4 : 2;
    REQUIRE(n >= *offset && (n - *offset) % *width == 0);
    return (n - *offset) / *width;
}

static int64_t shard_token(const uint8_t *bytes, size_t offset, size_t width, size_t i)
{
    uint32_t token = 0;
    memcpy(&token, bytes + offset + i * width, width);
    return token;
}

struct arrays {
    int32_t tokens[SEQ_LEN_MAX], labels[SEQ_LEN_MAX], position[SEQ_LEN_MAX], start[SEQ_LEN_MAX];
};

static void read_sample(struct data *d, enum data_set set, uint64_t q, struct arrays *a)
{
    struct data_sample sample = {a->tokens, a->labels, a->position, a->start};
    memset(a, 0x77, sizeof *a);
    if (data_read_sample(d, set, q, &sample) < 0)
        REQUIRE(!"a sample of data that was accepted can be read");
}

static void sample_is_sound(const struct data_config *c, const struct arrays *a)
{
    for (uint64_t t = 0; t < c->seq_len; t++) {
        REQUIRE(a->tokens[t] >= 0 && (uint64_t)a->tokens[t] < c->vocab_size);
        REQUIRE(a->labels[t] == DATA_NO_LABEL ||
                (a->labels[t] >= 0 && (uint64_t)a->labels[t] < c->vocab_size));
        REQUIRE(a->start[t] >= 0 && (uint64_t)a->start[t] <= t);
        REQUIRE(a->position[t] == (int32_t)t - a->start[t]);
        if (t + 1 < c->seq_len) {
            REQUIRE(a->start[t + 1] == a->start[t] || (uint64_t)a->start[t + 1] == t + 1);
            bool same_document = a->start[t + 1] == a->start[t];
            REQUIRE(a->labels[t] == DATA_NO_LABEL ||
                    (same_document && a->labels[t] == a->tokens[t + 1]));
        }
    }
}

/* By its name or, among shards, by its first bytes. */
static bool is_token_file(const struct data_config *c, const uint8_t *bytes, size_t n)
{
    return c->train[0] == paths[3] ||
           (c->train[0] == paths[0] && n >= 8 && memcmp(bytes, TOKEN_FILE_MAGIC, 8) == 0);
}

static uint32_t word_at(const uint8_t *bytes, size_t i)
{
    uint32_t word;
    memcpy(&word, bytes + TOKEN_FILE_HEADER_BYTES + i * sizeof word, sizeof word);
    return word;
}

/* The i-th token of the file, read by the oracle; negative past the end. */
static int64_t token_at(const struct data_config *c, const uint8_t *bytes, size_t n, size_t i)
{
    size_t offset, width;
    if (c->train[0] == paths[2]) /* .txt: a document of bytes */
        return i < n ? bytes[i] : i == n ? TOKENIZER_BYTES_END : -1;
    if (is_token_file(c, bytes, n))
        return TOKEN_FILE_HEADER_BYTES + 4 * i < n ? (int64_t)(word_at(bytes, i) & TOKEN_FILE_ID)
                                                   : -1;
    return i < shard_tokens(bytes, n, &offset, &width) ? shard_token(bytes, offset, width, i) : -1;
}

/* May the token behind the i-th be its label, by the file alone? */
static bool label_may_follow(const struct data_config *c, const uint8_t *bytes, size_t n, size_t i)
{
    int64_t end = c->train[0] == paths[2] ? TOKENIZER_BYTES_END : c->eos_id;
    if (!is_token_file(c, bytes, n))
        return token_at(c, bytes, n, i) != end;
    return token_at(c, bytes, n, i + 1) >= 0 && !(word_at(bytes, i) & TOKEN_FILE_END) &&
           !(word_at(bytes, i + 1) & TOKEN_FILE_MASKED);
}

/* Packed and in order, sample q holds the file's tokens from q * seq_len on. */
static void sample_is_of_file(const struct data_config *c, uint64_t q, const struct arrays *a,
                              const uint8_t *bytes, size_t n)
{
    for (uint64_t t = 0; t < c->seq_len; t++) {
        size_t at = q * c->seq_len + t;
        if (token_at(c, bytes, n, at) < 0) { /* padding */
            REQUIRE(c->keep_partial && a->labels[t] == DATA_NO_LABEL);
            continue;
        }
        REQUIRE(a->tokens[t] == token_at(c, bytes, n, at));
        REQUIRE(a->labels[t] == DATA_NO_LABEL || (label_may_follow(c, bytes, n, at) &&
                                                  a->labels[t] == token_at(c, bytes, n, at + 1)));
        if (is_token_file(c, bytes, n) && t + 1 < c->seq_len)
            REQUIRE((a->labels[t] != DATA_NO_LABEL) == label_may_follow(c, bytes, n, at));
    }
}

static void words_are_those_written(const uint8_t *bytes, size_t n)
{
    struct token_file_header h;
    memcpy(&h, bytes, sizeof h);
    REQUIRE(h.words_checksum == token_file_crc(0, bytes + sizeof h, n - sizeof h));
}

static void all_samples(struct data *d, const struct data_config *c, const uint8_t *bytes, size_t n)
{
    struct arrays a;
    uint64_t train = data_samples(d, DATA_TRAIN), held_out = data_samples(d, DATA_VALIDATION);
    bool in_order = c->train[0] != paths[1] && c->packing && !c->shuffle;
    if (is_token_file(c, bytes, n))
        words_are_those_written(bytes, n);
    if (is_token_file(c, bytes, n) && bytes[12] != TOKEN_FILE_TEXT)
        in_order = false; /* conversations are not cut out of the stream */
    REQUIRE(train > 0);
    for (uint64_t q = 0; q < train && q < SAMPLES_MAX; q++) {
        read_sample(d, DATA_TRAIN, q, &a);
        sample_is_sound(c, &a);
        if (in_order)
            sample_is_of_file(c, q, &a, bytes, n);
    }
    for (uint64_t q = 0; q < held_out && q < SAMPLES_MAX; q++) {
        read_sample(d, DATA_VALIDATION, q, &a);
        sample_is_sound(c, &a);
        if (in_order)
            sample_is_of_file(c, train + q, &a, bytes, n);
    }
}

static void same_again(struct data *d, const struct data_config *c)
{
    char text[4096];
    struct data *second;
    uint64_t hash[2], hash_again[2];
    struct arrays a, b;
    REQUIRE(data_open(&second, c, NULL, NULL) == 0);
    data_fingerprint(d, hash);
    data_fingerprint(second, hash_again);
    REQUIRE(memcmp(hash, hash_again, sizeof hash) == 0);
    REQUIRE(data_samples(d, DATA_TRAIN) == data_samples(second, DATA_TRAIN));
    read_sample(d, DATA_TRAIN, 3, &a);
    read_sample(second, DATA_TRAIN, 3, &b);
    REQUIRE(memcmp(&a, &b, sizeof a) == 0);
    REQUIRE(data_describe(d, text, sizeof text) > 0);
    data_close(second);
}

static struct data_config take_config(struct fuzz_input *in, const char **path)
{
    uint8_t flags = fuzz_u8(in);
    *path = paths[flags % KINDS];
    struct data_config c = {.train = path,
                            .n_train = 1,
                            .val_fraction = flags & FLAG_FRACTION ? 0.25 : 0.0,
                            .format = DATA_FORMAT_AUTO,
                            .packing = flags & FLAG_PACKING,
                            .shuffle = flags & FLAG_SHUFFLE,
                            .drop_overlong = flags & FLAG_DROP,
                            .keep_partial = flags & FLAG_PARTIAL,
                            .cache_dir = cache,
                            .seed = 5};
    c.seq_len = fuzz_u8(in) % (SEQ_LEN_MAX + 1);
    c.vocab_size = fuzz_u32(in);
    uint8_t eos[2];
    fuzz_take(in, eos, sizeof eos);
    c.eos_id = eos[0] & 1 ? eos[1] : DATA_NO_EOS;
    return c;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    const char *path;
    struct data_config c = take_config(&in, &path);
    struct data *d = NULL;
    fuzz_write_file(path, in.bytes, in.left);
    error_clear();
    int rc = data_open(&d, &c, NULL, NULL);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
    } else {
        all_samples(d, &c, in.bytes, in.left);
        same_again(d, &c);
        data_close(d);
    }
    (void)nftw(cache, remove_one, 8, FTW_DEPTH | FTW_PHYS); /* absent if refused early */
    return 0;
}

/* llm.c: magic, version, and the number of tokens that the size leaves room for. */
static size_t fix_shard(uint8_t *data, size_t size, size_t max_size, uint64_t *random)
{
    bool wide = fuzz_below(random, 2);
    size_t need = HEAD_BYTES + LLMC_HEADER_BYTES;
    if (size < need + 64 && max_size >= need + 64) {
        memset(data + size, 3, need + 64 - size);
        size = need + 64;
    }
    if (size < need)
        return size;
    size -= (size - need) % (wide ? 4 : 2);
    int32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1,
                         (int32_t)((size - need) / (wide ? 4 : 2))};
    memcpy(data + HEAD_BYTES, header, sizeof header);
    for (size_t i = need; wide && i + 4 <= size; i += 4) /* ids that a vocabulary may have */
        memset(data + i + 2, 0, 2);
    data[0] = (uint8_t)(data[0] & ~3u);
    return size;
}

/* A token file whose header fits its words, with ids that a vocabulary may have. */
static size_t fix_token_file(uint8_t *data, size_t size, size_t max_size, uint64_t *random)
{
    size_t need = HEAD_BYTES + TOKEN_FILE_HEADER_BYTES;
    if (max_size < need + 64)
        return size;
    if (size < need + 64) {
        memset(data + size, 3, need + 64 - size);
        size = need + 64;
    }
    size -= (size - need) % TOKEN_FILE_WORD_BYTES;
    struct token_file_header h = {.version = TOKEN_FILE_VERSION,
                                  .kind = 1 + (uint32_t)fuzz_below(random, 2),
                                  .tokens = (size - need) / TOKEN_FILE_WORD_BYTES};
    memcpy(h.magic, TOKEN_FILE_MAGIC, sizeof h.magic);
    for (uint64_t i = 0; i < h.tokens; i++) {
        uint32_t word;
        memcpy(&word, data + need + 4 * i, sizeof word);
        word = (word & ~TOKEN_FILE_ID) | (word & 0xffff) | (i + 1 == h.tokens ? TOKEN_FILE_END : 0);
        memcpy(data + need + 4 * i, &word, sizeof word);
        h.documents += (word & TOKEN_FILE_END) != 0;
    }
    h.words_checksum = token_file_crc(0, data + need, size - need);
    h.checksum = token_file_checksum(&h);
    memcpy(data + HEAD_BYTES, &h, sizeof h);
    data[0] |= 3;
    return size;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const char line[] = "{\"text\": \"a\\u00e9b\"}\n";
    const uint32_t vocabulary = 70000;
    uint64_t random = seed;
    size = LLVMFuzzerMutate(data, size, max_size);
    if (size < HEAD_BYTES)
        return size;
    if (fuzz_below(&random, 2) == 0)
        memcpy(data + 2, &vocabulary, sizeof vocabulary);
    switch (fuzz_below(&random, 8)) {
    case 0:
    case 1:
        return fix_shard(data, size, max_size, &random);
    case 2:
        if (size + sizeof line > max_size)
            return size;
        data[0] = (uint8_t)((data[0] & ~3u) | 1);
        if (fuzz_below(&random, 2) == 0)
            size = HEAD_BYTES;
        memcpy(data + size, line, sizeof line - 1);
        return size + sizeof line - 1;
    case 3:
    case 4:
        return fix_token_file(data, size, max_size, &random);
    default:
        return size;
    }
}
