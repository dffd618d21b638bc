/*
 * Samples: every token once, no label across documents, order a pure function. The reader is
 * compared with a plain twin that holds the whole data set in memory and knows where each document
 * ends.
 */
#include "tests/io/data_fixture.h"

#include "model/tokenizer_bytes.h"

#define TOKENS_MAX 200000
#define FILES      3

/* The data set as it should be seen: documents end where `end` is 1. */
static int32_t all[TOKENS_MAX];
static uint8_t end[TOKENS_MAX];
static uint64_t n_all;

static uint32_t random_state;
static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)(random_state >> 4) * below) >> 28);
}

static void push(int32_t token, int ends)
{
    assert_true(n_all < TOKENS_MAX);
    all[n_all] = token;
    end[n_all++] = (uint8_t)ends;
}

/* Documents of 1 to `longest` letters, in .jsonl files. */
static void make_text(const char **train, uint32_t documents, uint32_t longest)
{
    static char file[2 * TOKENS_MAX];
    for (int f = 0; f < FILES; f++) {
        size_t used = 0;
        char name[16];
        for (uint32_t i = 0; i < documents; i++) {
            used += (size_t)sprintf(file + used, "{\"text\":\"");
            for (uint32_t k = 1 + draw(longest); k > 0; k--) {
                file[used] = (char)('a' + draw(26));
                push(file[used++], 0);
            }
            push(TOKENIZER_BYTES_END, 1);
            used += (size_t)sprintf(file + used, "\"}\n");
        }
        sprintf(name, "%d.jsonl", f);
        train[f] = fixture_write(name, file, used);
    }
}

/* Raw u16 shards with 0 as the end of a document; also documents of one token, and open ends. */
static void make_shards(const char **train, uint32_t tokens, uint32_t eos_every)
{
    static uint16_t file[TOKENS_MAX];
    for (int f = 0; f < FILES; f++) {
        char name[16];
        uint32_t n = tokens + (uint32_t)f;
        for (uint32_t i = 0; i < n; i++) {
            file[i] = (uint16_t)(draw(eos_every) == 0 ? 0 : 1 + draw(200));
            push(file[i], file[i] == 0 || i + 1 == n);
        }
        sprintf(name, "%d.bin", f);
        train[f] = fixture_write(name, file, n * sizeof *file);
    }
}

static void setup_random(uint32_t seed)
{
    random_state = seed;
    n_all = 0;
}

/* One sample of the plain twin: tokens [from, to) are its inputs, `seen` is where its view ends. */
static void expect_sample(uint64_t from, uint64_t to, uint64_t seen, uint64_t seq_len,
                          int32_t padding)
{
    uint64_t start = 0;
    for (uint64_t t = 0; t < seq_len; t++) {
        uint64_t g = from + t;
        int is_input = g < to;
        if (g == to)
            start = t;
        assert_int_equal(fixture_tokens[t], is_input ? all[g] : padding);
        assert_int_equal(fixture_labels[t],
                         is_input && !end[g] && g + 1 < seen ? all[g + 1] : DATA_NO_LABEL);
        assert_int_equal(fixture_start[t], start);
        assert_int_equal(fixture_position[t], t - start);
        if (is_input && end[g])
            start = t + 1;
    }
}

static void check_packed(const struct data_config *c, int text)
{
    struct data *d = fixture_open(c);
    uint64_t extra = text ? 0 : 1, samples = (n_all - extra) / c->seq_len;
    assert_int_equal(data_samples(d, DATA_TRAIN), samples);
    for (uint64_t q = 0; q < samples; q++) { /* from .. to tile the stream: each token once */
        uint64_t from = q * c->seq_len, to = from + c->seq_len;
        fixture_read(d, DATA_TRAIN, q);
        expect_sample(from, to, to + extra, c->seq_len, 0);
    }
    data_close(d);
}

static void check_documents(const struct data_config *c, int text, int32_t padding)
{
    struct data *d = fixture_open(c);
    uint64_t q = 0;
    for (uint64_t from = 0, to; from < n_all; from = to) {
        for (to = from; !end[to]; to++)
            ;
        to++;
        for (uint64_t at = from; at + 1 < to; at += c->seq_len) { /* a lone last token: left out */
            uint64_t cut = at + c->seq_len < to ? at + c->seq_len : to;
            uint64_t seen = text ? cut : cut + 1 < to ? cut + 1 : to;
            fixture_read(d, DATA_TRAIN, q++);
            expect_sample(at, cut, seen, c->seq_len, padding);
        }
    }
    assert_int_equal(data_samples(d, DATA_TRAIN), q);
    data_close(d);
}

static void packed_text_is_cut_every_seq_len_tokens(void **state)
{
    (void)state;
    const uint64_t lengths[] = {2, 7, 64, 1000};
    for (size_t i = 0; i < 4; i++) {
        const char *train[FILES];
        setup_random(1 + (uint32_t)i);
        make_text(train, 100, 40);
        struct data_config c = fixture_config(train, FILES);
        c.seq_len = lengths[i];
        check_packed(&c, 1);
    }
}

/* The plain twin of keep_partial: the last sample may be short and is padded. */
static void check_partial(struct data_config *c, int text, int32_t padding)
{
    c->keep_partial = true;
    struct data *d = fixture_open(c);
    uint64_t q = 0;
    for (uint64_t from = 0; from + 1 < n_all; from += c->seq_len) {
        uint64_t to = from + c->seq_len < n_all ? from + c->seq_len : n_all;
        uint64_t seen = !text && to < n_all ? to + 1 : to;
        fixture_read(d, DATA_TRAIN, q++);
        expect_sample(from, to, seen, c->seq_len, padding);
    }
    assert_int_equal(data_samples(d, DATA_TRAIN), q);
    data_close(d);
}

static void an_evaluation_keeps_the_incomplete_end(void **state)
{
    (void)state;
    const uint64_t lengths[] = {2, 7, 64, 4000};
    for (size_t i = 0; i < 4; i++) {
        const char *train[FILES];
        setup_random(51 + (uint32_t)i);
        make_text(train, 20, 40); /* the longest sample is longer than all of it */
        struct data_config c = fixture_config(train, FILES);
        c.seq_len = lengths[i];
        check_partial(&c, 1, TOKENIZER_BYTES_END);
        setup_random(61 + (uint32_t)i);
        make_shards(train, 1000, 10);
        c.eos_id = 0;
        check_partial(&c, 0, 0);
    }
}

static void packed_shards_overlap_by_the_last_label(void **state)
{
    (void)state;
    const uint64_t lengths[] = {2, 7, 64, 1000};
    for (size_t i = 0; i < 4; i++) {
        const char *train[FILES];
        setup_random(11 + (uint32_t)i);
        make_shards(train, 3000, 30);
        struct data_config c = fixture_config(train, FILES);
        c.seq_len = lengths[i];
        c.eos_id = 0;
        check_packed(&c, 0);
    }
}

static void shards_without_an_end_token_are_one_document_per_file(void **state)
{
    (void)state;
    const char *train[FILES];
    setup_random(21);
    make_shards(train, 1000, 1u << 30); /* never 0 by the draw */
    struct data_config c = fixture_config(train, FILES);
    c.seq_len = 16;
    check_packed(&c, 0);
    c.packing = false;
    check_documents(&c, 0, 0);
}

static void unpacked_documents_have_samples_of_their_own(void **state)
{
    (void)state;
    const uint64_t lengths[] = {2, 7, 16, 1000};
    for (size_t i = 0; i < 4; i++) {
        const char *train[FILES];
        setup_random(31 + (uint32_t)i);
        make_text(train, 100, 40);
        struct data_config c = fixture_config(train, FILES);
        c.packing = false;
        c.seq_len = lengths[i];
        check_documents(&c, 1, TOKENIZER_BYTES_END);
        setup_random(41 + (uint32_t)i);
        make_shards(train, 70000 / FILES, 10);
        c.eos_id = 0;
        check_documents(&c, 0, 0);
    }
}

static void documents_of_one_token_are_left_out_and_counted(void **state)
{
    (void)state;
    const uint16_t tokens[] = {0, 0, 5, 0, 0};
    const char *train[] = {fixture_write("a.bin", tokens, sizeof tokens)};
    struct data_config c = fixture_config(train, 1);
    c.packing = false;
    c.eos_id = 0;
    struct data *d = fixture_open(&c);
    char text[1024];
    assert_int_equal(data_samples(d, DATA_TRAIN), 1);
    fixture_read(d, DATA_TRAIN, 0);
    EXPECT_ROW(fixture_tokens, 5, 0, 0, 0, 0, 0, 0, 0);
    EXPECT_ROW(fixture_labels, 0, -1, -1, -1, -1, -1, -1, -1);
    EXPECT_ROW(fixture_start, 0, 0, 2, 2, 2, 2, 2, 2);
    data_describe(d, text, sizeof text);
    assert_non_null(strstr(text, "3 documents of one token left out"));
    data_close(d);
    const uint16_t lonely[] = {0, 0};
    train[0] = fixture_write("b.bin", lonely, sizeof lonely);
    fixture_refused(&c, ERROR_USER, "2 tokens in 2 documents", "b.bin");
}

/* Fills order[i] with the number in the file of the sample that q = first + i reads. */
static void read_order(struct data *d, enum data_set set, uint64_t first, uint64_t n,
                       uint64_t *order)
{
    for (uint64_t i = 0; i < n; i++) {
        fixture_read(d, set, first + i);
        order[i] = (uint64_t)fixture_tokens[0] * 200 + (uint64_t)fixture_tokens[1];
    }
}

/* A shard whose sample i begins with the tokens i / 200, i % 200. */
static const char *make_numbered(const char *name, uint64_t samples, uint64_t seq_len)
{
    static uint16_t file[TOKENS_MAX];
    assert_true(samples * seq_len + 1 <= TOKENS_MAX);
    memset(file, 0, sizeof file);
    for (uint64_t i = 0; i < samples; i++) {
        file[i * seq_len] = (uint16_t)(i / 200);
        file[i * seq_len + 1] = (uint16_t)(i % 200);
    }
    return fixture_write(name, file, (samples * seq_len + 1) * sizeof *file);
}

static void an_epoch_is_a_permutation_that_differs_from_the_last(void **state)
{
    (void)state;
    enum { N = 1001 };
    static uint64_t order[3][N], again[N];
    const char *train[] = {make_numbered("a.bin", N, 8)};
    struct data_config c = fixture_config(train, 1);
    c.shuffle = true;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), N);
    uint64_t moved = 0, differ = 0;
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        uint8_t seen[N] = {0};
        read_order(d, DATA_TRAIN, epoch * N, N, order[epoch]);
        for (uint64_t i = 0; i < N; i++) {
            assert_true(order[epoch][i] < N);
            assert_int_equal(seen[order[epoch][i]]++, 0);
            moved += order[epoch][i] != i;
            differ += epoch > 0 && order[epoch][i] != order[epoch - 1][i];
        }
    }
    assert_true(moved > 3 * N - 50);
    assert_true(differ > 2 * N - 50);
    data_close(d);
    d = fixture_open(&c); /* the same again, from the middle, as a resumed run reads it */
    read_order(d, DATA_TRAIN, N + 500, 400, again);
    assert_memory_equal(again, &order[1][500], 400 * sizeof *again);
    data_close(d);
    c.seed++;
    d = fixture_open(&c);
    read_order(d, DATA_TRAIN, 0, N, again);
    assert_memory_not_equal(again, order[0], sizeof again);
    data_close(d);
}

static void held_out_samples_are_never_trained(void **state)
{
    (void)state;
    enum { N = 100 };
    uint64_t order[2 * N];
    const char *train[] = {make_numbered("a.bin", N, 8)};
    struct data_config c = fixture_config(train, 1);
    c.shuffle = true;
    c.val_fraction = 0.25;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 75);
    assert_int_equal(data_samples(d, DATA_VALIDATION), 25);
    read_order(d, DATA_TRAIN, 0, 150, order);
    for (int i = 0; i < 150; i++)
        assert_true(order[i] < 75);
    read_order(d, DATA_VALIDATION, 0, 50, order);
    for (uint64_t i = 0; i < 50; i++) /* in order, the same in every evaluation */
        assert_int_equal(order[i], 75 + i % 25);
    data_close(d);
    c.val_fraction = 1e-9;
    d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_VALIDATION), 1);
    data_close(d);
}

static void validation_files_are_numbered_by_themselves(void **state)
{
    (void)state;
    uint64_t order[40];
    const char *train[] = {make_numbered("a.bin", 50, 8)};
    const char *validation[] = {make_numbered("b.bin", 10, 8), make_numbered("c.bin", 10, 8)};
    struct data_config c = fixture_config(train, 1);
    c.validation = validation;
    c.n_validation = 1;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 50);
    assert_int_equal(data_samples(d, DATA_VALIDATION), 10);
    read_order(d, DATA_VALIDATION, 0, 10, order);
    for (uint64_t i = 0; i < 10; i++)
        assert_int_equal(order[i], i);
    data_close(d);
    c.n_validation = 2; /* 162 tokens: the second file's samples begin one token earlier */
    d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_VALIDATION), 20);
    data_close(d);
    c.val_fraction = 0.1;
    fixture_refused(&c, ERROR_USER, "data.validation", "data.val_fraction");
}

static void more_files_than_descriptors_are_read(void **state)
{
    (void)state;
    enum { MANY = 100 };
    const char *train[MANY];
    char text[32];
    for (int i = 0; i < MANY; i++) {
        snprintf(text, sizeof text, "m%02d.txt", i);
        const char *path = fixture_text(text, text); /* its own name: 7 bytes and the end */
        train[i] = strdup(path);
    }
    struct data_config c = fixture_config(train, MANY);
    c.shuffle = true;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), MANY);
    uint8_t seen[MANY] = {0};
    for (uint64_t q = 0; q < 3 * MANY; q++) {
        fixture_read(d, DATA_TRAIN, q);
        assert_int_equal(fixture_tokens[7], TOKENIZER_BYTES_END);
        seen[(fixture_tokens[1] - '0') * 10 + fixture_tokens[2] - '0']++;
    }
    for (int i = 0; i < MANY; i++) {
        assert_int_equal(seen[i], 3);
        free((char *)(uintptr_t)train[i]);
    }
    data_close(d);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(packed_text_is_cut_every_seq_len_tokens),
        TEST(an_evaluation_keeps_the_incomplete_end),
        TEST(packed_shards_overlap_by_the_last_label),
        TEST(shards_without_an_end_token_are_one_document_per_file),
        TEST(unpacked_documents_have_samples_of_their_own),
        TEST(documents_of_one_token_are_left_out_and_counted),
        TEST(an_epoch_is_a_permutation_that_differs_from_the_last),
        TEST(held_out_samples_are_never_trained),
        TEST(validation_files_are_numbered_by_themselves),
        TEST(more_files_than_descriptors_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
