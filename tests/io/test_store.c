/* The store's files: created once, refused when they are another's, locked, checked. */
#include "tests/io/store_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <sys/file.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <linux/magic.h>

static uint64_t file_size(const char *path, uint64_t *allocated)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    if (allocated)
        *allocated = (uint64_t)st.st_blocks * 512;
    return (uint64_t)st.st_size;
}

static void a_store_is_absent_then_created_then_ready(void **state)
{
    (void)state;
    struct fixture f;
    uint64_t allocated;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_state_now(f.store), STORE_ABSENT);
    assert_int_equal(access(f.paths[0], F_OK), -1); /* opening creates nothing */
    store_close(f.store);
    fixture_create(&f);
    uint64_t slots = file_size(f.store->directories[0].slots.path, &allocated);
    assert_true(allocated >= slots);
    assert_int_equal(slots + file_size(f.store->commit.path, NULL) + 8192,
                     store_bytes_needed(&f.layout, DTYPE_FLOAT32, 3));
    uint64_t fell_back = 99;
    assert_int_equal(fixture_recover(&f, &fell_back), 0);
    assert_int_equal(fell_back, 0);
    assert_int_equal(f.record.sequence, 0);
    assert_true(fixture_table_is_of_step(&f, 0));
    fixture_destroy(&f);
}

static void the_size_stays_the_same_over_steps_and_starts(void **state) /* C07 */
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_BFLOAT16, 8192, 1);
    fixture_create(&f);
    uint64_t before = file_size(f.store->directories[0].slots.path, NULL);
    for (unsigned i = 0; i < 3; i++) {
        fixture_steps(&f, 2);
        assert_int_equal(fixture_recover(&f, NULL), 0);
    }
    assert_int_equal(file_size(f.store->directories[0].slots.path, NULL), before);
    unsigned entries = 0;
    DIR *directory = opendir(f.paths[0]);
    while (readdir(directory) != NULL)
        entries++;
    (void)closedir(directory);
    assert_int_equal(entries, 2 + 3); /* . .. superblock slots commit */
    fixture_destroy(&f);
}

static int stop_soon(void *context, enum store_activity activity, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    *(unsigned *)context += activity == STORE_ZERO_FILLING;
    return activity == STORE_ZERO_FILLING;
}

static void an_interrupted_creation_is_wiped_and_redone_by_its_own_run(void **state)
{
    (void)state;
    struct fixture f;
    unsigned told = 0;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 2);
    f.options.on_progress = stop_soon;
    f.options.progress_context = &told;
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_create(f.store), -ERROR_STOPPED);
    assert_true(told > 0);
    store_close(f.store);
    f.store = NULL;
    f.options.on_progress = NULL;

    struct store_options other = f.options;
    other.run[0] ^= 1;
    assert_int_equal(store_open(&f.store, &other), -ERROR_USER);
    assert_non_null(strstr(error_text(), "another run"));

    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_state_now(f.store), STORE_ZEROING);
    store_close(f.store);
    f.store = NULL;
    fixture_create(&f);
    fixture_steps(&f, 1);
    assert_int_equal(fixture_recover(&f, NULL), 0);
    fixture_destroy(&f);
}

static void a_store_without_a_superblock_in_every_directory_is_incomplete(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_create(f.store), 0);
    store_close(f.store);
    f.store = NULL;
    (void)snprintf(f.paths[1], sizeof f.paths[1], "%s/1", f.root);
    f.directories[1] = f.paths[1];
    f.options.n_directories = 2; /* the user added a directory before the import was through */
    f.options.stripe_weights[1] = 1;
    fixture_create(&f);
    assert_int_equal(fixture_recover(&f, NULL), 0);
    fixture_destroy(&f);
}

static void a_commit_after_the_import_is_never_wiped(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_create(f.store), 0);
    assert_int_equal(commit_open(&f.commit, f.store), 0);
    assert_int_equal(fixture_import(&f), 0);
    fixture_steps(&f, 1); /* the superblock still says IMPORTING, as a damaged one might */
    fixture_close_store(&f);
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_state_now(f.store), STORE_IMPORTING);
    assert_int_equal(store_create(f.store), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "has a commit of step 1"));
    fixture_destroy(&f);
}

static void expect_refusal(struct fixture *f, const struct store_options *options, const char *what,
                           const char *expected, const char *found)
{
    struct store *store = NULL;
    assert_int_equal(store_open(&store, options), -ERROR_USER);
    assert_null(store);
    if (!strstr(error_text(), what) || !strstr(error_text(), expected) ||
        !strstr(error_text(), found) || !strstr(error_text(), f->root))
        fail_msg("unexpected text: %s", error_text());
}

static void a_store_that_differs_is_refused_with_both_values(void **state)
{
    (void)state;
    struct fixture f, g;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    fixture_create(&f);
    fixture_close_store(&f);
    struct store_options o = f.options;
    o.run[0] = 0xff;
    expect_refusal(&f, &o, "run", "ffcd03", "abcd03");
    o = f.options;
    o.dtype = DTYPE_BFLOAT16;
    expect_refusal(&f, &o, "dtype", "bfloat16", "float32");
    o = f.options;
    o.slots_per_page = 2;
    expect_refusal(&f, &o, "verify_writes", "expected 2", "found 3");
    fixture_init(&g, DTYPE_FLOAT32, 4096, 1);
    o = f.options;
    o.layout = &g.layout;
    expect_refusal(&f, &o, "page size", "4096", "8192");
    struct model_config config = fixture_config();
    config.intermediate_size = 128;
    struct model_layout other;
    assert_int_equal(model_layout_init(&other, &config, 8192), 0);
    o = f.options;
    o.layout = &other;
    (void)snprintf(o.model, sizeof o.model, "llama 2x32 narrow");
    expect_refusal(&f, &o, "model", "llama 2x32 narrow", "found llama 2x32\n");
    o = f.options;
    const char *two[] = {f.paths[0], g.root};
    o.directories = two;
    o.n_directories = 2;
    struct store *store = NULL;
    assert_int_equal(store_open(&store, &o), -ERROR_USER);
    assert_int_equal(store_open(&store, &f.options), 0); /* and nothing was changed */
    assert_int_equal(store_state_now(store), STORE_READY);
    store_close(store);
    model_layout_destroy(&other);
    fixture_destroy(&g);
    fixture_destroy(&f);
}

static void a_locked_store_is_busy_after_the_deadline(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    fixture_create(&f);
    struct store *second = NULL;
    assert_int_equal(store_open(&second, &f.options), -ERROR_BUSY);
    assert_non_null(strstr(error_text(), "still locked after 1 s"));
    assert_null(second);
    fixture_destroy(&f);
}

/* As after a kill: the lock goes when the dead process's last descriptor does. */
static void a_lock_that_goes_before_the_deadline_is_got(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    fixture_create(&f);
    fixture_close_store(&f);
    int ready[2];
    char byte;
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct store *held;
        byte = store_open(&held, &f.options) == 0;
        if (write(ready[1], &byte, 1) != 1)
            _exit(2);
        (void)usleep(300000);
        _exit(0); /* without closing anything */
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    assert_int_equal(store_open(&f.store, &f.options), 0);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    (void)close(ready[0]);
    (void)close(ready[1]);
    fixture_destroy(&f);
}

/* Every descriptor that I/O goes through holds the lock: the fence depends on it. */
static void every_data_file_is_locked(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 2);
    fixture_create(&f);
    const char *paths[] = {f.store->directories[0].slots.path, f.store->directories[1].slots.path,
                           f.store->commit.path, f.store->directories[0].superblock.path};
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < 4; i++) {
            int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
            assert_true(fd >= 0);
            assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), -1);
            assert_int_equal(errno, EWOULDBLOCK);
            assert_int_equal(close(fd), 0);
        }
        assert_int_equal(fixture_recover(&f, NULL), 0); /* created, then opened: both lock */
        paths[0] = f.store->directories[0].slots.path;
        paths[1] = f.store->directories[1].slots.path;
        paths[2] = f.store->commit.path;
        paths[3] = f.store->directories[0].superblock.path;
    }
    fixture_destroy(&f);
}

static void a_truncated_or_missing_file_is_named_with_both_sizes(void **state) /* C02 */
{
    (void)state;
    struct fixture f;
    char expected[64];
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    fixture_create(&f);
    char slots[PATH_MAX], commit[PATH_MAX];
    (void)snprintf(slots, sizeof slots, "%s", f.store->directories[0].slots.path);
    (void)snprintf(commit, sizeof commit, "%s", f.store->commit.path);
    uint64_t size = file_size(slots, NULL);
    fixture_close_store(&f);
    assert_int_equal(truncate(slots, (off_t)(size / 2)), 0);
    assert_int_equal(store_open(&f.store, &f.options), -ERROR_FAILED);
    (void)snprintf(expected, sizeof expected, "expected %llu bytes, found %llu",
                   (unsigned long long)size, (unsigned long long)(size / 2));
    assert_non_null(strstr(error_text(), slots));
    assert_non_null(strstr(error_text(), expected));
    assert_int_equal(truncate(slots, (off_t)size), 0);
    assert_int_equal(truncate(commit, 0), 0);
    assert_int_equal(store_open(&f.store, &f.options), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "found 0"));
    assert_int_equal(unlink(commit), 0);
    assert_int_equal(store_open(&f.store, &f.options), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "missing"));
    f.store = NULL;
    fixture_destroy(&f);
}

static void what_does_not_fit_is_refused_before_anything_is_written(void **state)
{
    (void)state;
    struct fixture f;
    struct model_layout huge;
    struct model_config config = fixture_config();
    config.vocab_size = 1ull << 30;
    config.hidden_size = 1ull << 14;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    assert_int_equal(model_layout_init(&huge, &config, 1ull << 30), 0);
    f.options.layout = &huge;
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_create(f.store), -ERROR_FIT);
    assert_non_null(strstr(error_text(), "need "));
    assert_non_null(strstr(error_text(), "have "));
    assert_int_equal(access(f.paths[0], F_OK), -1);
    store_close(f.store);
    /* weights not known yet: then the total decides, before the measuring that would write */
    (void)snprintf(f.paths[1], sizeof f.paths[1], "%s/1", f.root);
    f.directories[1] = f.paths[1];
    f.options.n_directories = 2;
    memset(f.options.stripe_weights, 0, sizeof f.options.stripe_weights);
    assert_int_equal(store_open(&f.store, &f.options), 0);
    assert_int_equal(store_create(f.store), -ERROR_FIT);
    assert_int_equal(access(f.paths[0], F_OK), -1);
    model_layout_destroy(&huge);
    fixture_destroy(&f);
}

static void directories_share_in_proportion_to_their_weights(void **state) /* C08 */
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 4096, 2);
    f.options.stripe_weights[0] = 3;
    f.options.stripe_weights[1] = 1;
    fixture_create(&f);
    double a = (double)f.store->directories[0].slots_bytes;
    double b = (double)f.store->directories[1].slots_bytes;
    assert_true(a / b > 2.4 && a / b < 3.6);
    fixture_steps(&f, 2);
    f.options.stripe_weights[0] = 1; /* the map is the creation's, whatever is asked for later */
    assert_int_equal(fixture_recover(&f, NULL), 0);
    assert_true(fixture_table_is_of_step(&f, 2));
    fixture_destroy(&f);
}

static void unknown_weights_are_measured_and_kept(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 4096, 2);
    memset(f.options.stripe_weights, 0, sizeof f.options.stripe_weights);
    fixture_create(&f);
    assert_true(f.store->weights[0] > 0 && f.store->weights[1] > 0);
    fixture_steps(&f, 1);
    assert_int_equal(fixture_recover(&f, NULL), 0);
    fixture_destroy(&f);
}

static void direct_io_is_used_where_the_file_system_has_it(void **state) /* C03 */
{
    (void)state;
    struct fixture f;
    struct statx st;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    fixture_create(&f);
    int fd = f.store->directories[0].slots.fd;
    assert_int_equal(statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st), 0);
    if ((st.stx_mask & STATX_DIOALIGN) && st.stx_dio_offset_align > 0) {
        assert_true(fcntl(fd, F_GETFL) & O_DIRECT);
        assert_true(fcntl(f.store->commit.fd, F_GETFL) & O_DIRECT);
        assert_true(fcntl(f.store->commit.fd, F_GETFL) & O_DSYNC);
        assert_null(strstr(store_notice(f.store), "slots"));
    } else {
        assert_non_null(strstr(store_notice(f.store), "slots"));
    }
    fixture_destroy(&f);
}

static void tmpfs_is_buffered_and_says_so(void **state) /* C04 */
{
    (void)state;
    struct statfs fs;
    if (statfs("/dev/shm", &fs) != 0 || fs.f_type != TMPFS_MAGIC)
        skip();
    struct fixture f;
    fixture_init_in(&f, DTYPE_FLOAT32, 8192, 1, "/dev/shm");
    fixture_create(&f);
    assert_non_null(strstr(store_notice(f.store), "tmpfs"));
    assert_non_null(strstr(store_notice(f.store), "buffered"));
    assert_false(fcntl(f.store->directories[0].slots.fd, F_GETFL) & O_DIRECT);
    fixture_steps(&f, 2);
    assert_int_equal(fixture_recover(&f, NULL), 0);
    assert_true(fixture_table_is_of_step(&f, 2));
    fixture_destroy(&f);
}

static void one_damaged_superblock_copy_never_makes_a_ready_store_incomplete(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 1);
    fixture_create(&f);
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s", f.store->directories[0].superblock.path);
    for (unsigned copy = 0; copy < 2; copy++) {
        fixture_close_store(&f);
        fixture_flip(path, copy * 4096 + 700);
        assert_int_equal(fixture_recover(&f, NULL), 0);
        assert_int_equal(store_verify(f.store, &f.record, f.forming, NULL, NULL), -ERROR_FAILED);
        assert_non_null(strstr(error_text(), "superblock"));
        fixture_close_store(&f);
        fixture_flip(path, copy * 4096 + 700);
    }
    fixture_flip(path, 0);
    fixture_flip(path, 4096);
    assert_int_equal(store_open(&f.store, &f.options), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "superblock"));
    f.store = NULL;
    fixture_destroy(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_store_is_absent_then_created_then_ready),
        cmocka_unit_test(the_size_stays_the_same_over_steps_and_starts),
        cmocka_unit_test(an_interrupted_creation_is_wiped_and_redone_by_its_own_run),
        cmocka_unit_test(a_store_without_a_superblock_in_every_directory_is_incomplete),
        cmocka_unit_test(a_commit_after_the_import_is_never_wiped),
        cmocka_unit_test(a_store_that_differs_is_refused_with_both_values),
        cmocka_unit_test(a_locked_store_is_busy_after_the_deadline),
        cmocka_unit_test(a_lock_that_goes_before_the_deadline_is_got),
        cmocka_unit_test(every_data_file_is_locked),
        cmocka_unit_test(a_truncated_or_missing_file_is_named_with_both_sizes),
        cmocka_unit_test(what_does_not_fit_is_refused_before_anything_is_written),
        cmocka_unit_test(directories_share_in_proportion_to_their_weights),
        cmocka_unit_test(unknown_weights_are_measured_and_kept),
        cmocka_unit_test(direct_io_is_used_where_the_file_system_has_it),
        cmocka_unit_test(tmpfs_is_buffered_and_says_so),
        cmocka_unit_test(one_damaged_superblock_copy_never_makes_a_ready_store_incomplete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
