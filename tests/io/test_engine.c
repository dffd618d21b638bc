/* One suite over every engine: io_uring, sync, and the lying one where a lie must be survived. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io_worker/engine.h"
#include "procs/error.h"
#include "tests/io/lying_engine.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEPTH = 4, FILE_BYTES = 3 << 20 };

struct bench {
    char directory[64], path[96];
    int fd;
    struct engine *engine;
    unsigned char *buffer; /* 2 x FILE_BYTES, page aligned */
    struct engine_region region;
};

static struct bench bench;

static void open_file(int flags)
{
    (void)snprintf(bench.directory, sizeof bench.directory, "/tmp/mt-engine-XXXXXX");
    assert_non_null(mkdtemp(bench.directory));
    (void)snprintf(bench.path, sizeof bench.path, "%s/file", bench.directory);
    bench.fd = open(bench.path, O_RDWR | O_CREAT | O_CLOEXEC | flags, 0600);
    assert_true(bench.fd >= 0);
    assert_int_equal(posix_memalign((void **)&bench.buffer, 4096, 2 * FILE_BYTES), 0);
    for (unsigned i = 0; i < 2 * FILE_BYTES; i++)
        bench.buffer[i] = (unsigned char)(i * 2654435761u >> 13);
    bench.region = (struct engine_region){bench.buffer, 2 * FILE_BYTES};
}

static struct engine_file the_file(uint64_t alignment)
{
    return (struct engine_file){bench.fd, bench.path, alignment};
}

static void open_bench(enum engine_kind kind)
{
    open_file(0);
    struct engine_file file = the_file(1);
    struct engine_options options = {.kind = kind,
                                     .depth = DEPTH,
                                     .files = &file,
                                     .n_files = 1,
                                     .regions = &bench.region,
                                     .n_regions = 1};
    assert_int_equal(engine_open(&bench.engine, &options), 0);
}

static void open_lying(struct liar *liar, uint64_t alignment, uint64_t transfer_bytes_max)
{
    open_file(0);
    struct engine_file file = the_file(alignment);
    struct engine_options options = {
        .depth = DEPTH, .files = &file, .n_files = 1, .transfer_bytes_max = transfer_bytes_max};
    print_message("seed %llu\n", (unsigned long long)liar->seed);
    assert_int_equal(liar_open(&bench.engine, &options, liar), 0);
}

static void close_bench(void)
{
    engine_close(bench.engine);
    assert_int_equal(close(bench.fd), 0);
    assert_int_equal(unlink(bench.path), 0);
    assert_int_equal(rmdir(bench.directory), 0);
    free(bench.buffer);
}

static int move(enum io_op op, void *buffer, uint64_t offset, uint64_t bytes)
{
    struct io_request request = {.op = op, .buffer = buffer, .offset = offset, .bytes = bytes};
    return engine_run(bench.engine, &request);
}

static enum engine_kind kind_of(void **state)
{
    return *(enum engine_kind *)*state;
}

/* C01 */
static void what_is_written_is_read_back_at_every_size(void **state)
{
    static const uint64_t sizes[] = {1,
                                     511,
                                     512,
                                     513,
                                     4095,
                                     4096,
                                     4097,
                                     (1 << 20) - 1,
                                     1 << 20,
                                     (1 << 20) + 1,
                                     (1 << 20) + 716928,
                                     2 * (1 << 20) + 716928};
    open_bench(kind_of(state));
    unsigned char *back = bench.buffer + FILE_BYTES;
    for (unsigned i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const uint64_t offset = i * 37;
        assert_int_equal(move(IO_WRITE, bench.buffer, offset, sizes[i]), 0);
        assert_int_equal(move(IO_FLUSH, NULL, 0, 0), 0);
        memset(back, 0, sizes[i]);
        assert_int_equal(move(IO_READ, back, offset, sizes[i]), 0);
        assert_memory_equal(back, bench.buffer, sizes[i]);
    }
    close_bench();
}

static void unregistered_memory_works_like_registered(void **state)
{
    open_bench(kind_of(state));
    unsigned char outside[5000], back[5000];
    /* the region is registered, or the notice says why not */
    assert_true(engine_notice(bench.engine)[0] == '\0' ||
                strstr(engine_notice(bench.engine), "ulimit -l") != NULL);
    memset(outside, 7, sizeof outside);
    assert_int_equal(move(IO_WRITE, outside, 100, sizeof outside), 0);
    assert_int_equal(move(IO_READ, back, 100, sizeof back), 0);
    assert_memory_equal(outside, back, sizeof back);
    close_bench();
}

static void a_file_that_ended_is_an_error_that_says_so(void **state)
{
    open_bench(kind_of(state));
    assert_int_equal(move(IO_WRITE, bench.buffer, 0, 5000), 0);
    assert_int_equal(move(IO_READ, bench.buffer, 0, 6000), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "read of 6000 bytes at offset 0 of "));
    assert_non_null(strstr(error_text(), "file ended after 5000 bytes"));
    assert_int_equal(move(IO_READ, bench.buffer, 9000, 10), -ERROR_FAILED);
    close_bench();
}

static void an_error_of_the_kernel_is_told_with_its_place(void **state)
{
    open_bench(kind_of(state));
    engine_close(bench.engine);
    int read_only = open(bench.path, O_RDONLY | O_CLOEXEC);
    struct engine_file file = {read_only, bench.path, 1};
    struct engine_options options = {
        .kind = kind_of(state), .depth = 1, .files = &file, .n_files = 1};
    assert_int_equal(engine_open(&bench.engine, &options), 0);
    assert_int_equal(move(IO_WRITE, bench.buffer, 8192, 4096), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "write of 4096 bytes at offset 8192 of "));
    assert_non_null(strstr(error_text(), strerror(EBADF)));
    assert_int_equal(close(read_only), 0);
    close_bench();
}

static void count_done(struct io_request *request, int result)
{
    assert_int_equal(result, 0);
    (*(unsigned *)request->context)++;
}

static void a_full_engine_says_so_and_takes_more_after_poll(void **state)
{
    open_bench(kind_of(state));
    unsigned done = 0;
    struct io_request requests[DEPTH + 1];
    for (unsigned i = 0; i <= DEPTH; i++)
        requests[i] = (struct io_request){.op = IO_WRITE,
                                          .buffer = bench.buffer,
                                          .offset = i * 4096,
                                          .bytes = 4096,
                                          .on_done = count_done,
                                          .context = &done};
    for (unsigned i = 0; i < DEPTH; i++)
        assert_int_equal(engine_submit(bench.engine, &requests[i]), ENGINE_ACCEPTED);
    assert_int_equal(engine_submit(bench.engine, &requests[DEPTH]), ENGINE_FULL);
    assert_int_equal(engine_in_flight(bench.engine), DEPTH);
    assert_ptr_equal(engine_oldest(bench.engine), &requests[0]);
    while (engine_in_flight(bench.engine) > 0) {
        struct pollfd waited = {.fd = engine_event_fd(bench.engine), .events = POLLIN};
        assert_int_equal(poll(&waited, 1, 5000), 1);
        (void)engine_poll(bench.engine);
    }
    assert_int_equal(done, DEPTH);
    assert_null(engine_oldest(bench.engine));
    assert_int_equal(engine_submit(bench.engine, &requests[DEPTH]), ENGINE_ACCEPTED);
    while (done <= DEPTH)
        (void)engine_wait(bench.engine, 1000);
    assert_int_equal(engine_poll(bench.engine), 0);
    close_bench();
}

static void resubmit(struct io_request *request, int result)
{
    assert_int_equal(result, 0);
    unsigned *left = request->context;
    if (--*left > 0) {
        request->offset += request->bytes;
        assert_int_equal(engine_submit(bench.engine, request), ENGINE_ACCEPTED);
    }
}

static void a_callback_may_submit_its_request_again(void **state)
{
    open_bench(kind_of(state));
    unsigned left = 50;
    struct io_request request = {.op = IO_WRITE,
                                 .buffer = bench.buffer,
                                 .bytes = 4096,
                                 .on_done = resubmit,
                                 .context = &left};
    assert_int_equal(engine_submit(bench.engine, &request), ENGINE_ACCEPTED);
    while (left > 0)
        (void)engine_wait(bench.engine, 1000);
    struct stat st;
    assert_int_equal(fstat(bench.fd, &st), 0);
    assert_int_equal(st.st_size, 50 * 4096);
    close_bench();
}

static void closing_waits_for_what_is_in_flight(void **state)
{
    open_bench(kind_of(state));
    unsigned done = 0;
    struct io_request request = {.op = IO_WRITE,
                                 .buffer = bench.buffer,
                                 .bytes = FILE_BYTES,
                                 .on_done = count_done,
                                 .context = &done};
    assert_int_equal(engine_submit(bench.engine, &request), ENGINE_ACCEPTED);
    close_bench();
    assert_int_equal(done, 1);
}

/* C10, on the real engines: a small limit stands for 0x7ffff000. */
static void a_large_request_is_split(void **state)
{
    open_file(0);
    struct engine_file file = the_file(1);
    struct engine_options options = {.kind = kind_of(state),
                                     .depth = 2,
                                     .files = &file,
                                     .n_files = 1,
                                     .transfer_bytes_max = 10007};
    assert_int_equal(engine_open(&bench.engine, &options), 0);
    assert_int_equal(move(IO_WRITE, bench.buffer, 3, FILE_BYTES), 0);
    memset(bench.buffer + FILE_BYTES, 0, FILE_BYTES);
    assert_int_equal(move(IO_READ, bench.buffer + FILE_BYTES, 3, FILE_BYTES), 0);
    assert_memory_equal(bench.buffer, bench.buffer + FILE_BYTES, FILE_BYTES);
    close_bench();
}

/* C09 */
static void io_uring_forbidden_gives_the_sync_engine_and_a_sentence(void **state)
{
    (void)state;
    open_file(0);
    struct engine_file file = the_file(1);
    struct engine_options options = {.kind = ENGINE_AUTO, .depth = 2, .files = &file, .n_files = 1};
    struct rlimit old, none;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = old;
    /* no descriptor left for a ring, as in a sandbox; the eventfd takes the last one */
    int next = dup(bench.fd);
    assert_true(next >= 0);
    assert_int_equal(close(next), 0);
    none.rlim_cur = (rlim_t)next + 1;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    int rc = engine_open(&bench.engine, &options);
    options.kind = ENGINE_URING;
    struct engine *forced = NULL;
    int forced_rc = engine_open(&forced, &options);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(rc, 0);
    assert_string_equal(engine_name(bench.engine), "sync");
    assert_non_null(strstr(engine_notice(bench.engine), "io_uring is not available here"));
    assert_int_equal(forced_rc, -ERROR_FAILED);
    close_bench();
}

static void engine_names_are_parsed_and_others_refused(void **state)
{
    (void)state;
    enum engine_kind kind;
    assert_int_equal(engine_kind_parse("io_uring", &kind), 0);
    assert_int_equal(kind, ENGINE_URING);
    assert_int_equal(engine_kind_parse("sync", &kind), 0);
    assert_int_equal(kind, ENGINE_SYNC);
    assert_int_equal(engine_kind_parse("libaio", &kind), -ERROR_USER);
    assert_non_null(strstr(error_text(), "libaio"));
}

/* -- the lying engine -- */

static void short_transfers_are_continued(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct liar liar = LIAR_HONEST(seed);
        liar.short_percent = 60;
        liar.retry_percent = 20;
        open_lying(&liar, seed % 2 ? 1 : 4096, 1 << 18);
        assert_int_equal(move(IO_WRITE, bench.buffer, 0, FILE_BYTES), 0);
        memset(bench.buffer + FILE_BYTES, 0, FILE_BYTES);
        assert_int_equal(move(IO_READ, bench.buffer + FILE_BYTES, 0, FILE_BYTES), 0);
        assert_memory_equal(bench.buffer, bench.buffer + FILE_BYTES, FILE_BYTES);
        assert_true(liar.transfers > 2 * FILE_BYTES / (1 << 18));
        close_bench();
    }
}

static struct io_request watched;

static int64_t unaligned_starts;

static void watch_start(void *self, const struct engine_transfer *t)
{
    unaligned_starts += t->offset % 4096 != 0 || t->bytes % 4096 != 0;
    liar_start(self, t);
}

static void a_direct_transfer_goes_on_only_from_an_aligned_byte(void **state)
{
    (void)state;
    struct liar liar = LIAR_HONEST(5);
    liar.short_percent = 70;
    open_file(0);
    struct engine_file file = the_file(4096);
    struct engine_options options = {
        .depth = 1, .files = &file, .n_files = 1, .transfer_bytes_max = 100000};
    struct engine_backend backend = liar_backend;
    backend.start = watch_start;
    liar.event_fd = eventfd(0, EFD_NONBLOCK);
    liar.n_files = 1;
    liar.fds[0] = dup(bench.fd);
    assert_int_equal(engine_open_backend(&bench.engine, &options, &backend, &liar), 0);
    watched = (struct io_request){.op = IO_WRITE, .buffer = bench.buffer, .bytes = FILE_BYTES};
    unaligned_starts = 0;
    assert_int_equal(engine_run(bench.engine, &watched), 0);
    assert_int_equal(unaligned_starts, 0);
    close_bench();
}

/* C10 */
static void no_transfer_is_larger_than_one_system_call_moves(void **state)
{
    (void)state;
    struct liar liar = LIAR_HONEST(3);
    liar.fail_at = 1;
    liar.fail_as = EIO; /* 5 GB are asked for and never touched */
    open_lying(&liar, 4096, 0);
    struct io_request request = {.op = IO_WRITE, .buffer = bench.buffer, .bytes = 5ull << 30};
    liar.fail_op = IO_WRITE;
    assert_int_equal(engine_run(bench.engine, &request), -ERROR_FAILED);
    assert_int_equal(liar.largest, 0x7ffff000);
    close_bench();
}

static void endless_retries_end_in_an_error(void **state)
{
    (void)state;
    struct liar liar = LIAR_HONEST(4);
    liar.always_retry = 1;
    open_lying(&liar, 1, 0);
    assert_int_equal(move(IO_WRITE, bench.buffer, 0, 4096), -ERROR_FAILED);
    assert_int_equal(liar.transfers, ENGINE_IDLE_RETRIES_MAX + 1);
    close_bench();
}

static void a_failed_flush_is_never_tried_again(void **state)
{
    (void)state;
    struct liar liar = LIAR_HONEST(6);
    liar.fail_op = IO_FLUSH;
    liar.fail_at = 1;
    liar.fail_as = EIO;
    open_lying(&liar, 1, 0);
    assert_int_equal(move(IO_FLUSH, NULL, 0, 0), -ERROR_FAILED);
    assert_int_equal(liar.count[IO_FLUSH], 1);
    assert_non_null(strstr(error_text(), "fdatasync of "));
    close_bench();
}

static void an_error_in_the_middle_tells_how_far_it_came(void **state)
{
    (void)state;
    struct liar liar = LIAR_HONEST(7);
    liar.fail_op = IO_WRITE;
    liar.fail_at = 3;
    liar.fail_as = ENOSPC;
    open_lying(&liar, 4096, 8192);
    assert_int_equal(move(IO_WRITE, bench.buffer, 0, 65536), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "No space left on device after 16384 bytes"));
    close_bench();
}

static enum engine_kind uring = ENGINE_URING, sync_kind = ENGINE_SYNC;

#define OVER_BOTH(test)                                                                            \
    {#test " (io_uring)", test, NULL, NULL, &uring},                                               \
    {                                                                                              \
#test " (sync)", test, NULL, NULL, &sync_kind                                              \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        OVER_BOTH(what_is_written_is_read_back_at_every_size),
        OVER_BOTH(unregistered_memory_works_like_registered),
        OVER_BOTH(a_file_that_ended_is_an_error_that_says_so),
        OVER_BOTH(an_error_of_the_kernel_is_told_with_its_place),
        OVER_BOTH(a_full_engine_says_so_and_takes_more_after_poll),
        OVER_BOTH(a_callback_may_submit_its_request_again),
        OVER_BOTH(closing_waits_for_what_is_in_flight),
        OVER_BOTH(a_large_request_is_split),
        cmocka_unit_test(io_uring_forbidden_gives_the_sync_engine_and_a_sentence),
        cmocka_unit_test(engine_names_are_parsed_and_others_refused),
        cmocka_unit_test(short_transfers_are_continued),
        cmocka_unit_test(a_direct_transfer_goes_on_only_from_an_aligned_byte),
        cmocka_unit_test(no_transfer_is_larger_than_one_system_call_moves),
        cmocka_unit_test(endless_retries_end_in_an_error),
        cmocka_unit_test(a_failed_flush_is_never_tried_again),
        cmocka_unit_test(an_error_in_the_middle_tells_how_far_it_came),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
