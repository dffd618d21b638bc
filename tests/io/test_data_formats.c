/* What a source may be, sample by sample by hand, and what is refused with which words. */
#include "tests/io/data_fixture.h"

#include <stdint.h>
#include <sys/stat.h>

#include "model/jsonl.h"
#include "model/tokenizer_bytes.h"

#define _ DATA_NO_LABEL
#define E TOKENIZER_BYTES_END

static void a_text_file_is_one_document_of_bytes(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.txt", "abcdefghij")}; /* 11 tokens with the end */
    struct data_config c = fixture_config(train, 1);
    c.seq_len = 5;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 2);
    assert_int_equal(data_samples(d, DATA_VALIDATION), 0);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 'a', 'b', 'c', 'd', 'e');
    EXPECT_ROW(fixture_labels, 'b', 'c', 'd', 'e', _);
    EXPECT_ROW(fixture_position, 0, 1, 2, 3, 4);
    EXPECT_ROW(fixture_start, 0, 0, 0, 0, 0);
    fixture_read(d, DATA_TRAIN, 1);
    EXPECT_ROW(fixture_tokens, 'f', 'g', 'h', 'i', 'j');
    fixture_read(d, DATA_TRAIN, 2); /* the second epoch */
    EXPECT_ROW(fixture_tokens, 'a', 'b', 'c', 'd', 'e');
    char text[1024];
    assert_true(data_describe(d, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "1 documents, 11 tokens, 2 samples of 5"));
    assert_non_null(strstr(text, "the last 1 tokens fill no sample"));
    data_close(d);
}

static void a_mark_and_carriage_returns_in_text_are_bytes(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.txt", "\xef\xbb\xbf"
                                                 "a\r\n\xc3\xa9")};
    struct data_config c = fixture_config(train, 1);
    c.seq_len = 9;
    struct data *d = fixture_open(&c);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 0xef, 0xbb, 0xbf, 'a', '\r', '\n', 0xc3, 0xa9, E);
    EXPECT_ROW(fixture_labels, 0xbb, 0xbf, 'a', '\r', '\n', 0xc3, 0xa9, E, _);
    data_close(d);
}

static void each_line_of_jsonl_is_a_document(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.jsonl", "\xef\xbb\xbf{\"text\": \"ab\"}\r\n\n"
                                                   "{\"id\": 123456789012345678901234567890, "
                                                   "\"text\": \"\\u00e9\\n\\u0000\"}\n"
                                                   "  \t\n{\"text\": \"\"}\n{\"text\": \"z\"}")};
    struct data_config c = fixture_config(train, 1);
    c.seq_len = 10;
    struct data *d = fixture_open(&c);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 'a', 'b', E, 0xc3, 0xa9, '\n', 0, E, 'z', E);
    EXPECT_ROW(fixture_labels, 'b', E, _, 0xa9, '\n', 0, E, _, E, _);
    EXPECT_ROW(fixture_position, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1);
    EXPECT_ROW(fixture_start, 0, 0, 0, 3, 3, 3, 3, 3, 8, 8);
    char text[1024];
    data_describe(d, text, sizeof text);
    assert_non_null(strstr(text, "3 documents"));
    assert_non_null(strstr(text, "3 blank lines or empty texts skipped"));
    data_close(d);
}

static const char *write_llmc(const char *name, int32_t magic, int32_t version, int32_t count,
                              size_t cut)
{
    static uint8_t file[1024 + 64 * 4];
    memset(file, 0, sizeof file);
    int32_t header[3] = {magic, version, count};
    memcpy(file, header, sizeof header);
    size_t width = magic == 20240801 ? 4 : 2, n = count > 0 ? (size_t)count : 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = (uint32_t)(10 + i);
        memcpy(file + 1024 + i * width, &id, width); /* little endian */
    }
    return fixture_write(name, file, 1024 + n * width - cut);
}

static void shards_of_llmc_give_the_label_after_the_last_position(void **state)
{
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        const char *train[] = {wide ? write_llmc("w.bin", 20240801, 7, 9, 0)
                                    : write_llmc("n.bin", 20240520, 1, 9, 0)};
        struct data_config c = fixture_config(train, 1);
        c.seq_len = 4;
        c.eos_id = 12; /* the third token */
        struct data *d = fixture_open(&c);
        assert_int_equal(data_samples(d, DATA_TRAIN), 2);
        fixture_read(d, DATA_TRAIN, 0);
        EXPECT_ROW(fixture_tokens, 10, 11, 12, 13);
        EXPECT_ROW(fixture_labels, 11, 12, _, 14);
        EXPECT_ROW(fixture_position, 0, 1, 2, 0);
        EXPECT_ROW(fixture_start, 0, 0, 0, 3);
        fixture_read(d, DATA_TRAIN, 1);
        EXPECT_ROW(fixture_tokens, 14, 15, 16, 17);
        EXPECT_ROW(fixture_labels, 15, 16, 17, 18);
        data_close(d);
    }
}

static void a_shard_without_header_is_nanogpt(void **state)
{
    (void)state;
    const uint16_t tokens[] = {5, 6, 7, 8, 299};
    const char *train[] = {fixture_write("a.bin", tokens, sizeof tokens)};
    struct data_config c = fixture_config(train, 1);
    c.seq_len = 4;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 1);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 5, 6, 7, 8);
    EXPECT_ROW(fixture_labels, 6, 7, 8, 299);
    data_close(d);
}

static void damaged_shards_are_refused_with_both_numbers(void **state)
{
    (void)state;
    const char *train[1];
    struct data_config c = fixture_config(train, 1);
    train[0] = write_llmc("cut.bin", 20240520, 1, 20, 2);
    fixture_refused(&c, ERROR_USER, "20 tokens (a file of 1064 bytes)", "found 1062 bytes");
    train[0] = write_llmc("version.bin", 20240520, 2, 20, 0);
    fixture_refused(&c, ERROR_USER, "expected version 1", "found 2");
    train[0] = write_llmc("none.bin", 20240801, 7, 0, 0);
    fixture_refused(&c, ERROR_USER, "says 0 tokens", "none.bin");
    train[0] = write_llmc("negative.bin", 20240801, 7, -5, 0);
    fixture_refused(&c, ERROR_USER, "says -5 tokens", "negative.bin");
    train[0] = write_llmc("short.bin", 20240520, 1, 1, 900);
    fixture_refused(&c, ERROR_USER, "a header of 1024 bytes", "has 126");
    train[0] = write_llmc("eval.bin", 20240522, 1, 20, 0);
    fixture_refused(&c, ERROR_USER, "multiple-choice", "eval.bin");
    train[0] = fixture_text("odd.bin", "abc");
    fixture_refused(&c, ERROR_USER, "odd number of bytes, 3", "odd.bin");
}

static void an_id_outside_the_vocabulary_is_named_with_its_place(void **state)
{
    (void)state;
    uint16_t tokens[700000] = {0};
    tokens[600001] = 300;
    const char *train[] = {fixture_write("big.bin", tokens, sizeof tokens)};
    struct data_config c = fixture_config(train, 1);
    fixture_refused(&c, ERROR_USER, "token 600001 (byte offset 1200002) has id 300",
                    "vocab_size = 300");
    c.vocab_size = 301;
    struct data *d = fixture_open(&c);
    data_close(d);
    c.vocab_size = 300; /* what the cache knows of the shard must not hide it */
    fixture_refused(&c, ERROR_USER, "token 600001", "vocab_size = 300");
    uint32_t wide[256 + 3] = {20240801, 7, 3};
    wide[257] = 0xffffffffu;
    train[0] = fixture_write("wide.bin", wide, sizeof wide);
    fixture_refused(&c, ERROR_USER, "token 1 (byte offset 1028) has id 4294967295", "wide.bin");
}

static void text_that_is_not_utf8_is_refused_with_its_offset(void **state)
{
    (void)state;
    const char *train[1];
    struct data_config c = fixture_config(train, 1);
    train[0] = fixture_text("a.txt", "abc\xff"
                                     "def");
    fixture_refused(&c, ERROR_USER, "a.txt: not valid UTF-8 at byte offset 3", "iconv");
    train[0] = fixture_text("cut.txt", "abcd\xe2\x82");
    fixture_refused(&c, ERROR_USER, "cut.txt", "offset 4");
    train[0] = fixture_text("b.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \"\xc0\x80\"}\n");
    fixture_refused(&c, ERROR_USER, "b.jsonl:3: ", "offset 25");
    char big[3000000];
    memset(big, 'a', sizeof big);
    big[2999999] = (char)0xfe;
    train[0] = fixture_write("big.txt", big, sizeof big);
    fixture_refused(&c, ERROR_USER, "big.txt", "offset 2999999");
}

static void bad_lines_are_refused_with_their_number(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{\"text\": \"a\"}\n{\"text\": \"b\"\n", "error at column"},
        {"{\"text\": \"a\"}\n[\"text\"]\n", "found an array"},
        {"{\"text\": \"a\"}\n{\"prompt\": \"b\", \"completion\": 1}\n",
         "found only \"prompt\", \"completion\""},
        {"{\"text\": \"a\"}\n{}\n", "an empty object"},
        {"{\"text\": \"a\"}\n{\"text\": 5}\n", "found a number"},
        {"{\"text\": \"a\"}\n{\"text\": \"b\", \"text\": \"c\"}\n", "duplicate"},
        {"{\"text\": \"a\"}\n{\"text\": \"\\ud800\"}\n", "error at column"},
        {"{\"text\": \"a\"}\n{\"text\": \"b\"} x\n", "error at column"},
        {"{\"text\": \"a\"}\nplain text\n", "error at column"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *train[] = {fixture_text("a.jsonl", cases[i][0])};
        struct data_config c = fixture_config(train, 1);
        fixture_refused(&c, ERROR_USER, "a.jsonl:2: ", cases[i][1]);
    }
    const char *train[] = {fixture_text("a.jsonl", "\n\n{\"text\": \"\"}\n")};
    struct data_config c = fixture_config(train, 1);
    fixture_refused(&c, ERROR_USER, "no document", "3 blank lines or empty texts");
}

static void a_line_without_end_is_refused_within_bounded_memory(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.jsonl", "{\"text\": \"a\"}\n{\"text\": \"")};
    int fd = open(train[0], O_WRONLY | O_APPEND);
    char *block = malloc(1 << 20);
    memset(block, 'x', 1 << 20);
    for (int i = 0; i < 65; i++)
        assert_int_equal(write(fd, block, 1 << 20), 1 << 20);
    free(block);
    close(fd);
    struct data_config c = fixture_config(train, 1);
    fixture_refused(&c, ERROR_USER, "a.jsonl:2: the line is longer than 67108864 bytes", "hint");
}

static void files_that_cannot_be_data_are_refused_by_name(void **state)
{
    (void)state;
    const char *train[2];
    char directory[128];
    struct data_config c = fixture_config(train, 1);
    train[0] = "/nonexistent/a.txt";
    fixture_refused(&c, ERROR_USER, "/nonexistent/a.txt: cannot open", "No such file");
    train[0] = fixture_text("empty.txt", "");
    fixture_refused(&c, ERROR_USER, "empty.txt", "empty");
    train[0] = fixture_text("empty.bin", "");
    fixture_refused(&c, ERROR_USER, "empty.bin", "empty");
    snprintf(directory, sizeof directory, "%s/d.txt", fixture_directory);
    assert_int_equal(mkdir(directory, 0755), 0);
    train[0] = directory;
    fixture_refused(&c, ERROR_USER, "d.txt", "a directory");
    train[0] = fixture_text("a.parquet", "PAR1");
    fixture_refused(&c, ERROR_USER, "a.parquet", "tokenizer.json");
    train[0] = fixture_text("a.csv", "a,b");
    fixture_refused(&c, ERROR_USER, "a.csv", "expected .txt, .jsonl, .parquet or .bin");
    train[0] = fixture_text("short.txt", "abc");
    fixture_refused(&c, ERROR_USER, "4 tokens in 1 documents", "seq_len = 8");
    c.n_train = 2;
    train[0] = fixture_text("a.txt", "abcdefghijkl");
    train[1] = write_llmc("b.bin", 20240520, 1, 20, 0);
    fixture_refused(&c, ERROR_USER, "text and token shards in one run", "b.bin");
    c.n_train = 1;
    c.validation = &train[1];
    c.n_validation = 1;
    fixture_refused(&c, ERROR_USER, "text and token shards in one run", "b.bin");
}

static void configurations_that_cannot_work_are_refused(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    c.tokenizer = DATA_TOKENIZER_FILE;
    fixture_refused(&c, ERROR_USER, "a.txt: text", "not tokenized");
    c = fixture_config(train, 1);
    c.vocab_size = 256;
    fixture_refused(&c, ERROR_USER, "at least 257", "vocab_size is 256");
    c.vocab_size = 257;
    struct data *d = fixture_open(&c);
    data_close(d);
    c.seq_len = 1;
    fixture_refused(&c, ERROR_USER, "seq_len", "found 1");
    c = fixture_config(train, 1);
    c.val_fraction = 1.0;
    fixture_refused(&c, ERROR_USER, "val_fraction", "found 1");
    c.val_fraction = 0.5; /* of one sample */
    fixture_refused(&c, ERROR_USER, "leaves none to train on", "of 1 samples");
    c = fixture_config(train, 1);
    c.format = DATA_FORMAT_TOKENS;
    fixture_refused(&c, ERROR_USER, "a.txt", "the name says text");
    const char *named[] = {fixture_text("README", "abcdefghijkl")};
    c = fixture_config(named, 1);
    c.format = DATA_FORMAT_TEXT;
    d = fixture_open(&c);
    data_close(d);
}

static void every_sequence_of_bytes_is_judged_as_rfc_3629_does(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int offset; /* of the first bad byte, -1: good, -2: cut at the end */
    } cases[] = {
        {"plain", -1},
        {"\xc2\x80", -1},
        {"\xdf\xbf", -1},
        {"\xe0\xa0\x80", -1},
        {"\xed\x9f\xbf", -1},
        {"\xee\x80\x80", -1},
        {"\xef\xbf\xbf", -1},
        {"\xf0\x90\x80\x80", -1},
        {"\xf4\x8f\xbf\xbf", -1},
        {"\x80", 0},
        {"\xc1\xbf", 0},
        {"\xe0\x9f\xbf", 1},
        {"\xed\xa0\x80", 1},
        {"\xf0\x8f\xbf\xbf", 1},
        {"\xf4\x90\x80\x80", 1},
        {"\xf5\x80\x80\x80", 0},
        {"a\xe2\x28\xa1", 2},
        {"a\xe2\x82", -2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct utf8_check u = {0};
        int bad = -1;
        for (size_t k = 0; k < strlen(cases[i].text) && bad == -1; k++)
            if (utf8_check_feed(&u, cases[i].text + k, 1) < 0)
                bad = (int)u.bad_offset;
        if (bad == -1 && utf8_check_end(&u) < 0)
            bad = -2;
        assert_int_equal(bad, cases[i].offset);
    }
}

static void byte_tokens_come_back_as_the_same_text(void **state)
{
    (void)state;
    uint16_t tokens[256];
    char bytes[256], back;
    for (int i = 0; i < 256; i++)
        bytes[i] = (char)i;
    tokenizer_bytes_encode(bytes, 256, tokens);
    for (int i = 0; i < 256; i++) {
        assert_int_equal(tokenizer_bytes_decode(tokens[i], &back), 1);
        assert_int_equal(back, bytes[i]);
    }
    assert_int_equal(tokenizer_bytes_decode(TOKENIZER_BYTES_END, &back), 0);
    assert_int_equal(tokenizer_bytes_decode(100000, &back), 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(every_sequence_of_bytes_is_judged_as_rfc_3629_does),
        TEST(byte_tokens_come_back_as_the_same_text),
        TEST(a_text_file_is_one_document_of_bytes),
        TEST(a_mark_and_carriage_returns_in_text_are_bytes),
        TEST(each_line_of_jsonl_is_a_document),
        TEST(shards_of_llmc_give_the_label_after_the_last_position),
        TEST(a_shard_without_header_is_nanogpt),
        TEST(damaged_shards_are_refused_with_both_numbers),
        TEST(an_id_outside_the_vocabulary_is_named_with_its_place),
        TEST(text_that_is_not_utf8_is_refused_with_its_offset),
        TEST(bad_lines_are_refused_with_their_number),
        TEST(a_line_without_end_is_refused_within_bounded_memory),
        TEST(files_that_cannot_be_data_are_refused_by_name),
        TEST(configurations_that_cannot_work_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
