/* The cache: reused when the source is the same, made again when not, never half a file. */
#include "tests/io/data_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include "io_worker/data_cache.h"

/* Counts bytes that sources were read for; stops when told to. */
struct watch {
    uint64_t calls;
    uint64_t stop_at; /* call at which to stop; 0: never */
};

static int on_progress(void *arg, const char *path, uint64_t done, uint64_t total)
{
    struct watch *w = arg;
    assert_non_null(path);
    assert_true(done <= total);
    w->calls++;
    return w->calls == w->stop_at;
}

static uint64_t open_and_count(const struct data_config *c, int32_t first_token)
{
    struct watch w = {0, 0};
    struct data *d = NULL;
    if (data_open(&d, c, on_progress, &w) < 0)
        fail_msg("%s", error_text());
    fixture_read(d, DATA_TRAIN, 0);
    assert_int_equal(fixture_tokens[0], first_token);
    data_close(d);
    return w.calls;
}

/* The one file in the cache whose name ends so; its path, or NULL. */
static const char *cache_file(const struct data_config *c, const char *suffix, int *n)
{
    static char path[512];
    const char *found = NULL;
    DIR *dir = opendir(c->cache_dir);
    assert_non_null(dir);
    *n = 0;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        size_t k = strlen(e->d_name), m = strlen(suffix);
        *n += e->d_name[0] != '.';
        if (k > m && strcmp(e->d_name + k - m, suffix) == 0) {
            snprintf(path, sizeof path, "%s/%s", c->cache_dir, e->d_name);
            found = path;
        }
    }
    closedir(dir);
    return found;
}

/* An hour ago, so that the file is not younger than the clock can tell. Its ctime stays now. */
static void set_old(const char *path)
{
    struct timespec times[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void a_text_is_tokenized_once(void **state)
{
    (void)state;
    int n;
    const char *train[] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    assert_true(open_and_count(&c, 'a') > 0);
    const char *path = cache_file(&c, ".tokens", &n);
    struct stat before, after;
    assert_int_equal(n, 1);
    assert_int_equal(stat(path, &before), 0);
    open_and_count(&c, 'a');
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino,
                     after.st_ino); /* the same file, not a new one renamed over it */
}

static void a_source_is_not_even_read_again_once_it_is_old(void **state)
{
    (void)state;
    const uint16_t tokens[16] = {1, 2, 3};
    const char *train[2] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    const char *shard = fixture_write("b.bin", tokens, sizeof tokens);
    sleep(3); /* longer than DATA_CACHE_RACY_NS */
    assert_true(open_and_count(&c, 'a') > 0);
    assert_int_equal(open_and_count(&c, 'a'), 0);
    train[0] = shard;
    assert_true(open_and_count(&c, 1) > 0);
    assert_int_equal(open_and_count(&c, 1), 0);
}

static void a_source_younger_than_the_clock_can_tell_is_never_taken_for_unchanged(void **state)
{
    (void)state;
    struct data_cache_header h = {.source = {1, 2, 3, .mtime_ns = 500, .ctime_ns = 1000}};
    struct data_identity now = h.source;
    h.scanned_ns = 1000 + DATA_CACHE_RACY_NS - 1;
    assert_false(data_cache_matches(&h, &now));
    h.scanned_ns++;
    assert_true(data_cache_matches(&h, &now));
    now.ctime_ns++;
    assert_false(data_cache_matches(&h, &now));
}

static void a_changed_text_of_the_same_size_and_time_is_noticed(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    uint64_t before[2], after[2];
    struct data *d = fixture_open(&c);
    data_fingerprint(d, before);
    data_close(d);
    struct stat s;
    assert_int_equal(stat(train[0], &s), 0);
    fixture_text("a.txt", "Xbcdefghijkl");
    assert_int_equal(utimensat(AT_FDCWD, train[0], (struct timespec[]){s.st_atim, s.st_mtim}, 0),
                     0);
    open_and_count(&c, 'X');
    d = fixture_open(&c);
    data_fingerprint(d, after);
    data_close(d);
    assert_memory_not_equal(before, after, sizeof before);
}

static void a_changed_shard_of_the_same_size_is_scanned_again(void **state)
{
    (void)state;
    uint16_t tokens[16] = {1, 2, 3};
    const char *train[] = {fixture_write("a.bin", tokens, sizeof tokens)};
    struct data_config c = fixture_config(train, 1);
    open_and_count(&c, 1);
    tokens[5] = 60000;
    fixture_write("a.bin", tokens, sizeof tokens);
    fixture_refused(&c, ERROR_USER, "token 5 ", "has id 60000");
}

static void a_damaged_cache_file_is_made_again(void **state)
{
    (void)state;
    int n;
    const char *train[] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    open_and_count(&c, 'a');
    const char *path = cache_file(&c, ".tokens", &n);
    assert_int_equal(truncate(path, 512 + 10), 0); /* cut */
    open_and_count(&c, 'a');
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, "X", 1, 40), 1); /* a flipped count in the header */
    close(fd);
    open_and_count(&c, 'a');
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 1);
    data_close(d);
}

static void flip(const char *path, int64_t offset)
{
    struct stat before;
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && fstat(fd, &before) == 0);
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
    const struct timespec times[2] = {before.st_atim, before.st_mtim};
    assert_int_equal(futimens(fd, times), 0); /* a drive that rots changes no times */
    close(fd);
}

/* Reads all samples: how many are refused, each with these words. */
static uint64_t count_refused(struct data *d, const char *path)
{
    uint64_t refused = 0;
    for (uint64_t q = 0; q < data_samples(d, DATA_TRAIN); q++) {
        error_clear();
        int rc = data_read_sample(d, DATA_TRAIN, q, &sample);
        if (rc == 0)
            continue;
        assert_int_equal(rc, -ERROR_FAILED);
        assert_non_null(strstr(error_text(), path));
        assert_non_null(strstr(error_text(), "damaged: bytes "));
        assert_non_null(strstr(error_text(), "may be removed"));
        refused++;
    }
    return refused;
}

enum { LONG = 150000 }; /* bytes of text: with 2 bytes a token, five blocks of checks */

static const char *long_text(const char *name)
{
    static char text[LONG];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('a' + i * i % 23);
    return fixture_write(name, text, sizeof text);
}

/* Flipped in the cache: exactly the samples of that block of 64 KiB are refused; made again, none.
 */
static void a_bit_of_a_tokenized_text_is_found_where_it_is_read(void **state)
{
    (void)state;
    int n;
    const char *train[] = {long_text("a.txt")};
    struct data_config c = fixture_config(train, 1);
    c.seq_len = 1024;
    c.shuffle = true;
    struct data *d = fixture_open(&c);
    assert_int_equal(count_refused(d, "a.txt"), 0);
    data_close(d);
    const char *path = cache_file(&c, ".tokens", &n);
    const int64_t places[] = {512 + 10, 512 + 65536, 512 + 2 * LONG}; /* the last: the end token */
    const uint64_t samples[] = {32, 32, 0};                           /* of which is in no sample */
    for (int i = 0; i < 3; i++) {
        flip(path, places[i]);
        d = fixture_open(&c);
        uint64_t last = (2 * LONG - 4 * 65536) / 2048; /* whole samples in the last block */
        assert_int_equal(count_refused(d, path), i < 2 ? samples[i] : last);
        data_close(d);
        flip(path, places[i]);
    }
    flip(path, 512 + 2 * (LONG + 1) + 8); /* the second check itself */
    d = fixture_open(&c);
    assert_int_equal(count_refused(d, path), 32);
    data_close(d);
    assert_int_equal(unlink(path), 0);
    d = fixture_open(&c);
    assert_int_equal(count_refused(d, path), 0);
    data_close(d);
}

static void a_bit_of_an_index_is_found_where_it_is_read(void **state)
{
    (void)state;
    int n;
    const char *train[] = {fixture_text("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"defgh\"}\n")};
    struct data_config c = fixture_config(train, 1);
    c.packing = false;
    struct data *d = fixture_open(&c);
    assert_int_equal(data_samples(d, DATA_TRAIN), 2);
    assert_int_equal(count_refused(d, "a.jsonl"), 0);
    data_close(d);
    const char *path = cache_file(&c, ".documents-8", &n);
    for (int64_t at = 0; at < 2 * 24; at += 8) {
        flip(path, 512 + at);
        d = fixture_open(&c);
        uint64_t refused = count_refused(d, path);
        assert_true(refused == 2);
        data_close(d);
        flip(path, 512 + at);
    }
}

/* The user's own file: what was scanned at the start is compared with what is read later. */
static void a_bit_of_a_shard_is_found_where_it_is_read(void **state)
{
    (void)state;
    static uint16_t tokens[50000];
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        tokens[i] = (uint16_t)(i % 250);
    const char *train[] = {fixture_write("a.bin", tokens, sizeof tokens)};
    struct data_config c = fixture_config(train, 1);
    c.seq_len = 1000;
    struct data *d = fixture_open(&c);
    assert_int_equal(count_refused(d, train[0]), 0);
    flip(train[0], 2 * 40000);
    assert_int_equal(count_refused(d, train[0]), 49 - 32); /* 32768 tokens in the first block */
    data_close(d);
}

static void an_interrupted_tokenization_leaves_nothing(void **state)
{
    (void)state;
    int n;
    static char text[5 << 20];
    memset(text, 'q', sizeof text);
    const char *train[] = {fixture_write("a.txt", text, sizeof text)};
    struct data_config c = fixture_config(train, 1);
    struct watch w = {0, 3};
    struct data *d = NULL;
    assert_int_equal(data_open(&d, &c, on_progress, &w), -ERROR_STOPPED);
    assert_non_null(strstr(error_text(), "a.txt"));
    assert_null(cache_file(&c, ".tokens", &n));
    assert_int_equal(n, 0);
    open_and_count(&c, 'q');
}

static void what_a_killed_run_left_is_overwritten(void **state)
{
    (void)state;
    int n;
    char left[600];
    const char *train[] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    open_and_count(&c, 'a');
    const char *path = cache_file(&c, ".tokens", &n);
    snprintf(left, sizeof left, "%s.tmp", path);
    assert_int_equal(rename(path, left), 0);
    int fd = open(left, O_WRONLY | O_APPEND);
    assert_int_equal(write(fd, "torn", 4), 4);
    close(fd);
    open_and_count(&c, 'a');
    assert_non_null(cache_file(&c, ".tokens", &n));
    assert_int_equal(n, 1);
    /* and while another process is at it, we do not write into its file */
    assert_int_equal(unlink(path), 0);
    fd = open(left, O_RDWR | O_CREAT, 0644);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    fixture_refused(&c, ERROR_BUSY, ".tokens.tmp", "another process");
    close(fd);
}

static void sources_of_one_name_do_not_share_a_cache_file(void **state)
{
    (void)state;
    char directory[128];
    snprintf(directory, sizeof directory, "%s/sub", fixture_directory);
    assert_int_equal(mkdir(directory, 0755), 0);
    const char *train[] = {fixture_text("a.txt", "abcdefg"), fixture_text("sub/a.txt", "ABCDEFG")};
    struct data_config c = fixture_config(train, 2);
    for (int pass = 0; pass < 2; pass++) {
        struct data *d = fixture_open(&c);
        fixture_read(d, DATA_TRAIN, 0);
        assert_int_equal(fixture_tokens[0], 'a');
        fixture_read(d, DATA_TRAIN, 1);
        assert_int_equal(fixture_tokens[0], 'A');
        data_close(d);
    }
}

static void a_shard_that_changes_during_the_run_stops_it(void **state)
{
    (void)state;
    uint16_t tokens[100] = {1, 2, 3};
    const char *train[] = {fixture_write("a.bin", tokens, sizeof tokens)};
    struct data_config c = fixture_config(train, 1);
    struct data *d = fixture_open(&c);
    set_old(train[0]); /* before the first read opens it */
    assert_int_equal(data_read_sample(d, DATA_TRAIN, 0, &sample), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "changed since the run started"));
    data_close(d);
    d = fixture_open(&c);
    fixture_read(d, DATA_TRAIN, 0);
    assert_int_equal(truncate(train[0], 50), 0); /* while it is open */
    assert_int_equal(data_read_sample(d, DATA_TRAIN, 11, &sample), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "a.bin: the file ends at offset"));
    data_close(d);
}

static void the_fingerprint_covers_what_decides_tokens(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.txt", "abcdefghijklmnopqrstuvwxyz"),
                           fixture_text("b.txt", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")};
    const char *swapped[] = {train[1], train[0]};
    struct data_config base = fixture_config(train, 2), variants[9];
    for (int i = 0; i < 9; i++)
        variants[i] = base;
    variants[1].seq_len = 9;
    variants[2].packing = false;
    variants[3].shuffle = true;
    variants[4].seed++;
    variants[5].val_fraction = 0.4;
    variants[6].train = swapped;
    variants[7].n_train = 1;
    variants[8].keep_partial = true;
    uint64_t hash[9][2];
    for (int i = 0; i < 9; i++) {
        struct data *d = fixture_open(&variants[i]);
        data_fingerprint(d, hash[i]);
        data_close(d);
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(hash[i], hash[k], sizeof hash[0]);
    }
    char moved[128]; /* a path is no part of it */
    snprintf(moved, sizeof moved, "%s/moved.txt", fixture_directory);
    assert_int_equal(rename(train[0], moved), 0);
    train[0] = moved;
    struct data *d = fixture_open(&base);
    data_fingerprint(d, hash[1]);
    data_close(d);
    assert_memory_equal(hash[0], hash[1], sizeof hash[0]);
}

static void a_cache_directory_that_cannot_be_made_is_named(void **state)
{
    (void)state;
    const char *train[] = {fixture_text("a.txt", "abcdefghijkl")};
    struct data_config c = fixture_config(train, 1);
    char path[160];
    snprintf(path, sizeof path, "%s/below", train[0]);
    c.cache_dir = path;
    fixture_refused(&c, ERROR_USER, "cannot create the folder", "a.txt");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_text_is_tokenized_once),
        TEST(a_source_is_not_even_read_again_once_it_is_old),
        TEST(a_source_younger_than_the_clock_can_tell_is_never_taken_for_unchanged),
        TEST(a_changed_text_of_the_same_size_and_time_is_noticed),
        TEST(a_changed_shard_of_the_same_size_is_scanned_again),
        TEST(a_damaged_cache_file_is_made_again),
        TEST(a_bit_of_a_tokenized_text_is_found_where_it_is_read),
        TEST(a_bit_of_an_index_is_found_where_it_is_read),
        TEST(a_bit_of_a_shard_is_found_where_it_is_read),
        TEST(an_interrupted_tokenization_leaves_nothing),
        TEST(what_a_killed_run_left_is_overwritten),
        TEST(sources_of_one_name_do_not_share_a_cache_file),
        TEST(a_shard_that_changes_during_the_run_stops_it),
        TEST(the_fingerprint_covers_what_decides_tokens),
        TEST(a_cache_directory_that_cannot_be_made_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
