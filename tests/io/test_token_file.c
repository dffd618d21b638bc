/* Token files (model/token_file.h): masks, documents and whole conversations, sample by sample by
 * hand, and what is refused with which words. */
#include "tests/io/data_fixture.h"

#include <stdint.h>
#include <sys/stat.h>

#include "model/token_file.h"

#define _ DATA_NO_LABEL
#define M TOKEN_FILE_MASKED
#define E TOKEN_FILE_END

enum { WORDS_MAX = 256, EOS = 2 };

struct file {
    struct token_file_header header;
    uint32_t words[WORDS_MAX];
};

/* What a writer of such a file would say of these words. */
static struct file file_of(enum token_file_kind kind, const uint32_t *words, size_t n)
{
    struct file f = {0};
    struct token_file_header *h = &f.header;
    memcpy(h->magic, TOKEN_FILE_MAGIC, sizeof h->magic);
    h->version = TOKEN_FILE_VERSION;
    h->kind = kind;
    h->tokens = n;
    strcpy(h->made_by, "tokenizers 0");
    strcpy(h->taken_as, kind == TOKEN_FILE_TEXT ? "text" : "messages");
    strcpy(h->source, "/data/a.jsonl");
    assert_true(n <= WORDS_MAX);
    memcpy(f.words, words, n * sizeof *words);
    for (size_t i = 0; i < n; i++)
        f.header.documents += (words[i] & E) != 0;
    f.header.labels = n - f.header.documents;
    f.header.words_checksum = token_file_crc(0, f.words, n * sizeof *words);
    f.header.checksum = token_file_checksum(&f.header);
    return f;
}

static const char *write_file(const char *name, const struct file *f)
{
    return fixture_write(name, f, sizeof f->header + f->header.tokens * sizeof *f->words);
}

#define WRITE(name, kind, ...)                                                                     \
    write_words(name, kind, (const uint32_t[]){__VA_ARGS__},                                       \
                sizeof(const uint32_t[]){__VA_ARGS__} / sizeof(uint32_t))

static const char *write_words(const char *name, enum token_file_kind kind, const uint32_t *words,
                               size_t n)
{
    struct file f = file_of(kind, words, n);
    return write_file(name, &f);
}

static struct data_config config_of(const char *const *train, size_t n, uint64_t seq_len)
{
    struct data_config c = fixture_config(train, n);
    c.seq_len = seq_len;
    c.eos_id = EOS;
    c.tokenizer = DATA_TOKENIZER_FILE;
    return c;
}

static void text_is_a_stream_whose_ends_are_flags_and_not_ids(void **state)
{
    (void)state;
    const char *train[] = {WRITE("a.mttokens", TOKEN_FILE_TEXT, 10, EOS, 11, EOS | E, 12, 13 | E)};
    struct data_config c = config_of(train, 1, 3);
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 2);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 10, EOS, 11);
    EXPECT_ROW(fixture_labels, EOS, 11, _);
    EXPECT_ROW(fixture_start, 0, 0, 0);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_tokens, EOS, 12, 13);
    EXPECT_ROW(fixture_labels, _, 13, _);
    EXPECT_ROW(fixture_position, 0, 0, 1);
    data_close(d);
}

/* The end of a turn is learned although it is the id that pads. */
static void what_is_masked_is_no_label(void **state)
{
    (void)state;
    const char *train[] = {
        WRITE("a.mttokens", TOKEN_FILE_INSTRUCTION, 20 | M, 21 | M, 30, EOS, 22 | M, 31, EOS | E)};
    struct data_config c = config_of(train, 1, 10);
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 1);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 20, 21, 30, EOS, 22, 31, EOS, EOS, EOS, EOS);
    EXPECT_ROW(fixture_labels, _, 30, EOS, _, 31, EOS, _, _, _, _);
    EXPECT_ROW(fixture_start, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7);
    data_close(d);
}

static void conversations_are_packed_whole_in_order(void **state)
{
    (void)state;
    const char *train[] = {WRITE("a.mttokens", TOKEN_FILE_INSTRUCTION, 20 | M, 30 | E, 21 | M, 31,
                                 32 | E, 22 | M, 33, 34 | E, 23 | M, 35 | E)};
    struct data_config c = config_of(train, 1, 6);
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 2);
    fixture_read(d, DATA_TRAIN, 0); /* 2 + 3 fit into 6, 3 more do not */
    EXPECT_ROW(fixture_tokens, 20, 30, 21, 31, 32, EOS);
    EXPECT_ROW(fixture_labels, 30, _, 31, 32, _, _);
    EXPECT_ROW(fixture_start, 0, 0, 2, 2, 2, 5);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_tokens, 22, 33, 34, 23, 35, EOS);
    EXPECT_ROW(fixture_position, 0, 1, 2, 0, 1, 0);
    data_close(d);
    c.packing = false;
    d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 4);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_tokens, 21, 31, 32, EOS, EOS, EOS);
    data_close(d);
}

static void describes(struct data *d, const char *wanted)
{
    char text[2048];
    assert_true(data_describe(d, text, sizeof text) < sizeof text);
    if (strstr(text, wanted) == NULL)
        fail_msg("expected \"%s\" in: %s", wanted, text);
}

static void overlong_conversations_are_cut_off_or_left_out_and_counted(void **state)
{
    (void)state;
    uint64_t cut[2], dropped[2];
    const char *train[] = {WRITE("a.mttokens", TOKEN_FILE_INSTRUCTION, 20 | M, 30, 31, 32, 33 | E,
                                 21 | M, 34 | E, 22 | M, 35, 36, 37 | E)};
    struct data_config c = config_of(train, 1, 4);
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 3);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 20, 30, 31, 32);
    EXPECT_ROW(fixture_labels, 30, 31, 32, _);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_tokens, 21, 34, EOS, EOS);
    describes(d, "1 conversations longer than 4 tokens truncated (data.overlong)");
    describes(d, "/data/a.jsonl as messages), tokenized by tokenizers 0: 3 documents, 11 tokens");
    data_fingerprint(d, cut);
    data_close(d);
    c.drop_overlong = true;
    d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 2);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 21, 34, EOS, EOS);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_labels, 35, 36, 37, _);
    describes(d, "1 conversations longer than 4 tokens left out (data.overlong)");
    data_fingerprint(d, dropped);
    assert_true(memcmp(cut, dropped, sizeof cut) != 0);
    data_close(d);
    c.seq_len = 2;
    c.train = (const char *[]){WRITE("b.mttokens", TOKEN_FILE_INSTRUCTION, 20 | M, 21, 22 | E)};
    fixture_refused(&c, ERROR_USER, "1 of 1 conversations", "training.seq_len = 2");
}

static void a_conversation_whose_answer_is_cut_off_makes_no_sample(void **state)
{
    (void)state;
    const char *train[] = {WRITE("a.mttokens", TOKEN_FILE_INSTRUCTION, 20 | M, 21 | M, 22 | M, 30,
                                 31 | E, 23 | M, 32 | E)};
    struct data_config c = config_of(train, 1, 3);
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 1);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 23, 32, EOS);
    describes(d, "1 conversations left out: nothing in them is learned");
    data_close(d);
}

static void text_beside_conversations_is_cut_and_packed(void **state)
{
    (void)state;
    const char *train[] = {
        WRITE("a.mttokens", TOKEN_FILE_TEXT, 10, 11, 12, 13, 14, 15, 16 | E, 17 | E, 18, 19 | E),
        WRITE("b.mttokens", TOKEN_FILE_INSTRUCTION, 20 | M, 30 | E)};
    struct data_config c = config_of(train, 2, 4);
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 4);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 10, 11, 12, 13);
    EXPECT_ROW(fixture_labels, 11, 12, 13, _);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_tokens, 14, 15, 16, EOS);
    fixture_read(d, DATA_TRAIN, 2); /* a document of one token is left out */
    EXPECT_ROW(fixture_tokens, 18, 19, EOS, EOS);
    fixture_read(d, DATA_TRAIN, 3);
    EXPECT_ROW(fixture_tokens, 20, 30, EOS, EOS);
    data_close(d);
}

static void the_fingerprint_is_of_the_words_and_not_of_the_header(void **state)
{
    (void)state;
    uint64_t first[2], second[2];
    const uint32_t words[] = {20 | M, 30, 31 | E};
    struct file f = file_of(TOKEN_FILE_INSTRUCTION, words, 3);
    const char *train[] = {write_file("a.mttokens", &f)};
    struct data_config c = config_of(train, 1, 4);
    struct data *d = fixture_open(&c);
    data_fingerprint(d, first);
    data_close(d);
    f.header.mtime_ns = 77;
    f.header.checksum = token_file_checksum(&f.header);
    (void)write_file("a.mttokens", &f);
    d = fixture_open(&c);
    data_fingerprint(d, second);
    data_close(d);
    assert_memory_equal(first, second, sizeof first);
    f.words[1] |= M;
    f.header.words_checksum = token_file_crc(0, f.words, 3 * sizeof *f.words);
    f.header.checksum = token_file_checksum(&f.header);
    (void)write_file("a.mttokens", &f);
    d = fixture_open(&c);
    data_fingerprint(d, second);
    data_close(d);
    assert_true(memcmp(first, second, sizeof first) != 0);
}

static void refused_after(void (*change)(struct file *), const char *a, const char *b)
{
    const uint32_t words[] = {20 | M, 30, 31 | E, 21 | M, 32 | E};
    struct file f = file_of(TOKEN_FILE_INSTRUCTION, words, 5);
    change(&f);
    const char *train[] = {fixture_write("a.mttokens", &f, sizeof f.header + 5 * 4)};
    struct data_config c = config_of(train, 1, 4);
    fixture_refused(&c, ERROR_USER, a, b);
}

/* As whoever wrote these words would have. */
static void sealed(struct file *f)
{
    f->header.words_checksum = token_file_crc(0, f->words, f->header.tokens * sizeof *f->words);
    f->header.checksum = token_file_checksum(&f->header);
}

static void other_magic(struct file *f)
{
    f->header.magic[0] = 'X';
}
static void other_version(struct file *f)
{
    f->header.version = 9;
}
static void flipped_bit(struct file *f)
{
    f->header.labels ^= 4;
}
static void more_tokens(struct file *f)
{
    f->header.tokens = UINT64_MAX / 4 + 6;
    f->header.checksum = token_file_checksum(&f->header);
}
static void more_documents(struct file *f)
{
    f->header.documents = 6;
    sealed(f);
}
static void another_document(struct file *f)
{
    f->header.documents = 3;
    sealed(f);
}
static void unknown_kind(struct file *f)
{
    f->header.kind = 3;
    sealed(f);
}
static void open_end(struct file *f)
{
    f->words[1] |= E;
    f->words[4] &= ~E;
    sealed(f);
}
static void flipped_word(struct file *f)
{
    f->words[3] ^= 1;
}
static void flipped_mask(struct file *f)
{
    f->words[1] ^= M;
}
static void large_id(struct file *f)
{
    f->words[3] = 300 | M;
}

/* Check value of CRC-32 and a second one (zlib.crc32), whole and in two pieces. */
static void the_checksum_is_zlibs(void **state)
{
    (void)state;
    static const char text[] = "The quick brown fox jumps over the lazy dog";
    assert_int_equal(token_file_crc(0, "123456789", 9), 0xcbf43926);
    for (size_t n = 0; n < sizeof text; n++) {
        uint32_t crc = token_file_crc(token_file_crc(0, text, n), text + n, sizeof text - 1 - n);
        assert_int_equal(crc, 0x414fa339);
    }
}

static void damaged_files_are_refused_by_what_is_wrong(void **state)
{
    (void)state;
    refused_after(other_magic, "a.mttokens", "expected a token file");
    refused_after(other_version, "version 2", "found 9");
    refused_after(flipped_bit, "checksum of the header", "expected");
    refused_after(more_tokens, "the header says", "532 bytes");
    refused_after(more_documents, "expected 1 to 5 documents", "found 6");
    refused_after(another_document, "expected 3 documents", "found 2 ends");
    refused_after(unknown_kind, "kind: expected 1 or 2", "found 3");
    refused_after(open_end, "damaged", "the end of one at the end");
    refused_after(flipped_word, "a.mttokens: damaged: checksum of the words", "expected");
    refused_after(flipped_mask, "a.mttokens: damaged: checksum of the words", "mtlaunch tokenize");
    refused_after(large_id, "token 3 (byte offset 524) has id 300", "vocab_size = 300");
    const char *train[] = {fixture_write("c.mttokens", "MTTOKENS", 8)};
    struct data_config c = config_of(train, 1, 4);
    fixture_refused(&c, ERROR_USER, "c.mttokens", "expected a token file");
}

static void other_data_cannot_be_mixed_in(void **state)
{
    (void)state;
    const uint16_t shard[] = {1, 2, 3};
    const char *train[] = {WRITE("a.mttokens", TOKEN_FILE_TEXT, 10, 11 | E),
                           fixture_write("b.bin", shard, sizeof shard)};
    struct data_config c = config_of(train, 2, 4);
    fixture_refused(&c, ERROR_USER, "a.mttokens is tokenized", "b.bin is token shards of nanoGPT");
    train[1] = fixture_text("c.txt", "abc");
    fixture_refused(&c, ERROR_USER, "a.mttokens is tokenized", "c.txt is text");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(text_is_a_stream_whose_ends_are_flags_and_not_ids),
        TEST(what_is_masked_is_no_label),
        TEST(conversations_are_packed_whole_in_order),
        TEST(overlong_conversations_are_cut_off_or_left_out_and_counted),
        TEST(a_conversation_whose_answer_is_cut_off_makes_no_sample),
        TEST(text_beside_conversations_is_cut_and_packed),
        TEST(the_fingerprint_is_of_the_words_and_not_of_the_header),
        TEST(the_checksum_is_zlibs),
        TEST(damaged_files_are_refused_by_what_is_wrong),
        TEST(other_data_cannot_be_mixed_in),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
