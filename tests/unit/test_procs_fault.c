/* Fault points: what MTLAUNCH_FAULT may say, and that a process then dies as told. */
#include "procs/error.h"
#include "procs/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void every_name_and_action_parses(void **state)
{
    (void)state;
    for (enum fault f = 0; f < FAULT_COUNT; f++)
        for (enum fault_action a = 0; a < FAULT_ACTION_COUNT; a++) {
            char text[128];
            struct fault_spec spec;
            (void)snprintf(text, sizeof text, "%s:%s", fault_name(f), fault_action_name(a));
            assert_int_equal(fault_parse(text, &spec), 0);
            assert_int_equal(spec.fault, f);
            assert_int_equal(spec.action, a);
            assert_int_equal(spec.nth, 1);
            assert_string_equal(spec.process, "");
            (void)strcat(text, ":18446744073709551615");
            assert_int_equal(fault_parse(text, &spec), 0);
            assert_true(spec.nth == UINT64_MAX);
        }
}

static void a_process_may_be_named(void **state)
{
    (void)state;
    struct fault_spec spec;
    assert_int_equal(fault_parse("opt_mid_apply@opt_worker.1:kill:2", &spec), 0);
    assert_int_equal(spec.fault, FAULT_opt_mid_apply);
    assert_int_equal(spec.action, FAULT_ACTION_kill);
    assert_int_equal(spec.nth, 2);
    assert_string_equal(spec.process, "opt_worker.1");
    assert_int_equal(fault_parse("opt_mid_apply@31.bytes.are.the.most.for.names:kill", &spec), 0);
    assert_int_equal(fault_parse("opt_mid_apply@32.bytes.are.one.more.than.that.:kill", &spec),
                     -ERROR_USER);
    assert_int_equal(fault_parse("opt_mid_apply@:kill", &spec), -ERROR_USER);
    assert_int_equal(fault_parse("opt_mid_apply@opt_worker.1", &spec), -ERROR_USER);
}

static void an_unknown_name_is_an_error_that_lists_the_names(void **state)
{
    (void)state;
    struct fault_spec spec;
    assert_int_equal(fault_parse("io_before_flus:kill", &spec), -ERROR_USER);
    assert_non_null(strstr(error_text(), "\"io_before_flus\""));
    for (enum fault f = 0; f < FAULT_COUNT; f++)
        assert_non_null(strstr(error_text(), fault_name(f)));
    assert_int_equal(fault_parse("io_before_flus@io_worker.0:kill", &spec), -ERROR_USER);
    assert_non_null(strstr(error_text(), "\"io_before_flus\""));
    assert_int_equal(fault_parse("io_before_flush:explode", &spec), -ERROR_USER);
    assert_non_null(strstr(error_text(), "\"explode\""));
    for (enum fault_action a = 0; a < FAULT_ACTION_COUNT; a++)
        assert_non_null(strstr(error_text(), fault_action_name(a)));
}

static void a_malformed_text_is_an_error(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "io_before_flush",
        "io_before_flush:",
        "io_before_flush:kill:",
        "io_before_flush:kill:0",
        "io_before_flush:kill:x",
        "io_before_flush:kill:-1",
        "io_before_flush:kill:1x",
        ":kill",
        "io_before_flush:kill:1:2",
        "io_before_flush:kill: 1",
        "",
        "io_before_flush:kill:99999999999999999999",
    };
    struct fault_spec spec;
    for (unsigned i = 0; i < sizeof texts / sizeof texts[0]; i++)
        assert_int_equal(fault_parse(texts[i], &spec), -ERROR_USER);
}

/* Runs `arrivals` of `fault` in a child armed with `text`; returns how it ended (WUNTRACED). */
static int child_run(const char *text, enum fault fault, unsigned arrivals, pid_t *pid)
{
    *pid = fork();
    assert_true(*pid >= 0);
    if (*pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        if (null < 0 || dup2(null, STDERR_FILENO) < 0 || setenv("MTLAUNCH_FAULT", text, 1) < 0 ||
            fault_arm_from_environment("opt_worker.1") < 0)
            _exit(99);
        (void)alarm(30); /* a child that hangs where it must not */
        for (unsigned i = 0; i < arrivals; i++)
            fault_point(fault);
        _exit(42);
    }
    int status;
    assert_int_equal(waitpid(*pid, &status, WUNTRACED), *pid);
    return status;
}

static void assert_dies_of(const char *text, int number)
{
    pid_t pid;
    int status = child_run(text, FAULT_io_before_record, 1, &pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), number);
}

static void a_process_dies_as_told(void **state)
{
    (void)state;
    assert_dies_of("io_before_record:kill", SIGKILL);
    assert_dies_of("io_before_record:segv", SIGSEGV);
    assert_dies_of("io_before_record:abort", SIGABRT);
    pid_t pid;
    int status = child_run("io_before_record:exit0", FAULT_io_before_record, 1, &pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void only_the_nth_arrival_at_the_named_point_acts(void **state)
{
    (void)state;
    pid_t pid;
    int status = child_run("opt_mid_apply:kill:3", FAULT_opt_mid_apply, 2, &pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    status = child_run("opt_mid_apply:kill:3", FAULT_opt_mid_apply, 3, &pid);
    assert_true(WIFSIGNALED(status));
    status = child_run("opt_mid_apply:kill", FAULT_opt_after_norm, 9, &pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    status = child_run("opt_mid_apply@opt_worker.0:kill", FAULT_opt_mid_apply, 9, &pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    status = child_run("opt_mid_apply@opt_worker.1:kill:9", FAULT_opt_mid_apply, 9, &pid);
    assert_true(WIFSIGNALED(status));
    status = child_run("", FAULT_opt_mid_apply, 9, &pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
}

static void a_stopped_process_goes_on_after_sigcont(void **state)
{
    (void)state;
    pid_t pid;
    int status = child_run("gpu_mid_forward:stop", FAULT_gpu_mid_forward, 5, &pid);
    assert_true(WIFSTOPPED(status));
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
}

static void a_hanging_process_stays_alive_until_killed(void **state)
{
    (void)state;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct fault_spec spec = {FAULT_gpu_mid_backward, FAULT_ACTION_hang, 1, ""};
        (void)close(STDERR_FILENO);
        fault_arm(&spec);
        fault_point(FAULT_gpu_mid_backward);
        _exit(42);
    }
    int status;
    (void)usleep(100000);
    assert_int_equal(waitpid(pid, &status, WNOHANG), 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
}

enum { STRIDE = 192, FRAMES = 5, POOL_BYTES = STRIDE * FRAMES, GUARD_BYTES = 4096 };

/* A child scribbles over two pools with unowned bytes around them; `after` is what it left. */
static void scribble(const char *seed, unsigned char after[3 * GUARD_BYTES])
{
    unsigned char *shared =
        mmap(NULL, 3 * GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)close(STDERR_FILENO);
        if (setenv("MTLAUNCH_FAULT", "gpu_mid_forward:scribble", 1) < 0 ||
            setenv("MTLAUNCH_FAULT_SEED", seed, 1) < 0 ||
            fault_arm_from_environment("gpu_worker.0") < 0)
            _exit(99);
        fault_offer_pool(shared + GUARD_BYTES, STRIDE, FRAMES);
        fault_offer_pool(shared + 2 * (ptrdiff_t)GUARD_BYTES, STRIDE, FRAMES);
        fault_point(FAULT_gpu_mid_forward);
        _exit(42);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
    memcpy(after, shared, 3 * GUARD_BYTES);
    (void)munmap(shared, 3 * GUARD_BYTES);
}

static int pools_hit(const unsigned char *after)
{
    int hit = 0;
    for (int i = 0; i < 3 * GUARD_BYTES; i++) {
        int inside = i >= GUARD_BYTES && i % GUARD_BYTES < POOL_BYTES;
        if (after[i])
            assert_true(inside);
        if (after[i])
            hit |= 1 << i / GUARD_BYTES;
    }
    return hit;
}

static void scribbled_frames_are_own_ones_and_the_same_for_a_seed(void **state)
{
    (void)state;
    static unsigned char after[3 * GUARD_BYTES], again[3 * GUARD_BYTES];
    int hit = 0;
    for (int seed = 0; seed < 16; seed++) {
        char text[8];
        (void)snprintf(text, sizeof text, "%d", seed);
        scribble(text, after);
        scribble(text, again);
        assert_memory_equal(after, again, sizeof after);
        assert_true(pools_hit(after) == 2 || pools_hit(after) == 4);
        hit |= pools_hit(after);
    }
    assert_int_equal(hit, 6);
}

static void the_file_of_a_fault_that_acts_once_says_who_and_when(void **state)
{
    (void)state;
    char directory[] = "/tmp/mt-fault-XXXXXX", path[64], line[128] = "";
    assert_non_null(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/once", directory);
    assert_int_equal(setenv("MTLAUNCH_FAULT_ONCE", path, 1), 0);
    pid_t first, second;
    long long before = (long long)time(NULL), seconds;
    int status = child_run("opt_mid_apply:kill", FAULT_opt_mid_apply, 1, &first);
    assert_true(WIFSIGNALED(status));
    status = child_run("opt_mid_apply:kill", FAULT_opt_mid_apply, 1, &second);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    (void)unsetenv("MTLAUNCH_FAULT_ONCE");
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    (void)fclose(f);
    int pid, n = sscanf(line, "opt_worker.1 %d %lld.", &pid, &seconds);
    assert_int_equal(n, 2);
    assert_int_equal(pid, first);
    assert_true(seconds >= before && seconds <= before + 60);
    (void)unlink(path);
    (void)rmdir(directory);
}

static void an_environment_with_a_typo_is_refused(void **state)
{
    (void)state;
    pid_t pid;
    int status = child_run("io_before_record:killl", FAULT_io_before_record, 1, &pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 99);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_name_and_action_parses),
        cmocka_unit_test(a_process_may_be_named),
        cmocka_unit_test(an_unknown_name_is_an_error_that_lists_the_names),
        cmocka_unit_test(a_malformed_text_is_an_error),
        cmocka_unit_test(a_process_dies_as_told),
        cmocka_unit_test(only_the_nth_arrival_at_the_named_point_acts),
        cmocka_unit_test(a_stopped_process_goes_on_after_sigcont),
        cmocka_unit_test(a_hanging_process_stays_alive_until_killed),
        cmocka_unit_test(scribbled_frames_are_own_ones_and_the_same_for_a_seed),
        cmocka_unit_test(the_file_of_a_fault_that_acts_once_says_who_and_when),
        cmocka_unit_test(an_environment_with_a_typo_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
