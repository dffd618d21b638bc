/* The log: one whole line per event whatever is in it, two files kept, and no failure that stops.
 */
#include "procs/error.h"
#include "procs/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char base[] = "/tmp/test_procs_log_XXXXXX";
static char dir[64];

static const char *path_of(const char *file)
{
    static char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", dir, file);
    return path;
}

static int set_up(void **state)
{
    (void)state;
    if (!mkdtemp(base))
        return -1;
    (void)snprintf(dir, sizeof dir, "%s/logs", base);
    return 0;
}

static int remove_logs(void **state)
{
    (void)state;
    log_close();
    log_set_threshold(LOG_INFO);
    (void)unlink(path_of("worker.log"));
    (void)rmdir(path_of("worker.log.1"));
    (void)unlink(path_of("worker.log.1"));
    (void)rmdir(dir);
    return 0;
}

static int tear_down(void **state)
{
    (void)remove_logs(state);
    return rmdir(base);
}

static char *contents(const char *file)
{
    static char text[1 << 20];
    FILE *f = fopen(path_of(file), "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    (void)fclose(f);
    return text;
}

static uint64_t size_of(const char *file)
{
    struct stat st;
    return stat(path_of(file), &st) == 0 ? (uint64_t)st.st_size : 0;
}

static unsigned lines_in(const char *text)
{
    unsigned lines = 0;
    for (; *text; text++)
        lines += *text == '\n';
    return lines;
}

static void a_line_has_utc_time_role_level_and_text(void **state)
{
    (void)state;
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_INFO, "store opened: %d directories", 3);
    int year, month, day, hour, minute, second, micro, end = 0;
    const char *text = contents("worker.log");
    assert_int_equal(sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d.%6dZ%n", &year, &month, &day, &hour,
                            &minute, &second, &micro, &end),
                     7);
    assert_int_equal(end, 27);
    assert_string_equal(text + end, " worker INFO  store opened: 3 directories\n");
}

static void control_bytes_are_escaped_and_cannot_forge_a_line(void **state)
{
    (void)state;
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_WARN, "%s",
             "a\nb\tc\rd\x1b[2Je\x7f"
             "f\xc2\x9bg caf\xc3\xa9");
    const char *text = contents("worker.log");
    assert_int_equal(lines_in(text), 1);
    assert_non_null(strstr(text, "a\\nb\\tc\\rd\\x1b[2Je\\x7ff\\xc2\\x9bg caf\xc3\xa9\n"));
}

static void a_long_line_is_cut_and_says_so(void **state)
{
    (void)state;
    char longest[3 * LOG_LINE_BYTES_MAX];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_INFO, "%s", longest);
    memset(longest, '\x01', sizeof longest - 1); /* four bytes each once escaped */
    log_line(LOG_INFO, "%s", longest);
    const char *text = contents("worker.log");
    assert_int_equal(lines_in(text), 2);
    assert_true(strlen(text) <= 2 * LOG_LINE_BYTES_MAX);
    assert_string_equal(text + strlen(text) - 4, "...\n");
}

static void two_files_are_kept_and_none_passes_the_limit(void **state)
{
    (void)state;
    enum { LIMIT = 8192 };
    assert_int_equal(log_open(dir, "worker", LIMIT), 0);
    for (int i = 0; i < 1000; i++) {
        log_line(LOG_INFO, "event %d of a thousand", i);
        assert_true(size_of("worker.log") <= LIMIT && size_of("worker.log.1") <= LIMIT);
    }
    assert_true(size_of("worker.log.1") > LIMIT / 2);
    assert_non_null(strstr(contents("worker.log"), "event 999 of a thousand\n"));
    assert_int_equal(access(path_of("worker.log.2"), F_OK), -1);
    int first, last;
    const char *now = strstr(contents("worker.log"), "event ");
    assert_int_equal(sscanf(now, "event %d", &first), 1);
    char *old = contents("worker.log.1");
    assert_int_equal(sscanf(strrchr(old, 'Z'), "Z worker INFO event %d", &last), 1);
    assert_int_equal(last + 1, first); /* nothing is lost between the two */
    assert_int_equal(log_lines_lost(), 0);
}

static void a_second_run_appends(void **state)
{
    (void)state;
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_INFO, "first run");
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_INFO, "second run");
    const char *text = contents("worker.log");
    assert_non_null(strstr(text, "first run\n"));
    assert_non_null(strstr(text, "second run\n"));
}

static void a_torn_tail_does_not_swallow_the_next_line(void **state)
{
    (void)state;
    assert_int_equal(mkdir(dir, 0777), 0);
    FILE *f = fopen(path_of("worker.log"), "w");
    assert_non_null(f);
    (void)fputs("half a li", f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_INFO, "next");
    const char *text = contents("worker.log");
    assert_int_equal(strncmp(text, "half a li\n20", 12), 0);
    assert_int_equal(lines_in(text), 2);
}

static void lines_above_the_threshold_are_not_written(void **state)
{
    (void)state;
    assert_int_equal(log_open(dir, "worker", 0), 0);
    log_line(LOG_DEBUG, "hidden");
    log_set_threshold(LOG_DEBUG);
    log_line(LOG_DEBUG, "shown");
    const char *text = contents("worker.log");
    assert_null(strstr(text, "hidden"));
    assert_non_null(strstr(text, " worker DEBUG shown\n"));
}

static void a_write_error_is_counted_told_and_stops_nothing(void **state)
{
    (void)state;
    struct rlimit before, tiny;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    tiny = before;
    tiny.rlim_cur = 100;
    (void)signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(log_open(dir, "worker", 0), 0);
    uint64_t lost = log_lines_lost();
    log_line(LOG_INFO, "before");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tiny), 0);
    for (int i = 0; i < 5; i++) {
        errno = EAGAIN;
        log_line(LOG_INFO, "lost line number %d, longer than what is left of a hundred bytes", i);
        assert_int_equal(errno, EAGAIN);
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    log_line(LOG_INFO, "after");
    assert_int_equal(log_lines_lost() - lost, 5);
    const char *text = contents("worker.log");
    assert_non_null(strstr(text, "WARN  5 log lines lost before this one\n"));
    assert_non_null(strstr(text, " worker INFO  after\n"));
}

static void a_rotation_that_fails_stops_nothing(void **state)
{
    (void)state;
    assert_int_equal(log_open(dir, "worker", LOG_LINE_BYTES_MAX), 0);
    assert_int_equal(mkdir(path_of("worker.log.1"), 0777), 0); /* rename onto it fails */
    uint64_t lost = log_lines_lost();
    for (int i = 0; i < 100; i++)
        log_line(LOG_INFO, "event %d, so that the limit is passed", i);
    assert_true(log_lines_lost() > lost);
    assert_true(size_of("worker.log") <= LOG_LINE_BYTES_MAX);
    assert_int_equal(rmdir(path_of("worker.log.1")), 0);
    log_line(LOG_INFO, "after");
    assert_non_null(strstr(contents("worker.log"), " INFO  after\n"));
}

static void a_directory_that_cannot_be_made_is_an_error_with_a_hint(void **state)
{
    (void)state;
    assert_int_equal(log_open("/nonexistent/logs", "worker", 0), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "/nonexistent/logs"));
    assert_non_null(strstr(error_text(), "hint:"));
    assert_int_equal(log_open(dir, "worker", 10), -ERROR_USER);
    assert_non_null(strstr(error_text(), "found 10"));
}

static void without_a_file_lines_go_to_stderr(void **state)
{
    (void)state;
    int pipes[2], saved = dup(STDERR_FILENO);
    char text[256];
    assert_true(saved >= 0);
    assert_int_equal(pipe(pipes), 0);
    assert_true(dup2(pipes[1], STDERR_FILENO) >= 0);
    log_line(LOG_ERROR, "early");
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    ssize_t n = read(pipes[0], text, sizeof text - 1);
    assert_true(n > 0);
    text[n] = '\0';
    assert_non_null(strstr(text, "ERROR early\n"));
    (void)close(pipes[0]);
    (void)close(pipes[1]);
    (void)close(saved);
}

#define T(f) cmocka_unit_test_teardown(f, remove_logs)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_line_has_utc_time_role_level_and_text),
        T(control_bytes_are_escaped_and_cannot_forge_a_line),
        T(a_long_line_is_cut_and_says_so),
        T(two_files_are_kept_and_none_passes_the_limit),
        T(a_second_run_appends),
        T(a_torn_tail_does_not_swallow_the_next_line),
        T(lines_above_the_threshold_are_not_written),
        T(a_write_error_is_counted_told_and_stops_nothing),
        T(a_rotation_that_fails_stops_nothing),
        T(a_directory_that_cannot_be_made_is_an_error_with_a_hint),
        T(without_a_file_lines_go_to_stderr),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
