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
#include <sys/wait.h>
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
            (void)strcat(text, ":18446744073709551615");
            assert_int_equal(fault_parse(text, &spec), 0);
            assert_true(spec.nth == UINT64_MAX);
        }
}

static void an_unknown_name_is_an_error_that_lists_the_names(void **state)
{
    (void)state;
    struct fault_spec spec;
    assert_int_equal(fault_parse("io_before_flus:kill", &spec), -ERROR_USER);
    assert_non_null(strstr(error_text(), "\"io_before_flus\""));
    for (enum fault f = 0; f < FAULT_COUNT; f++)
        assert_non_null(strstr(error_text(), fault_name(f)));
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
            fault_arm_from_environment() < 0)
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
        struct fault_spec spec = {FAULT_gpu_mid_backward, FAULT_ACTION_hang, 1};
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
        cmocka_unit_test(an_unknown_name_is_an_error_that_lists_the_names),
        cmocka_unit_test(a_malformed_text_is_an_error),
        cmocka_unit_test(a_process_dies_as_told),
        cmocka_unit_test(only_the_nth_arrival_at_the_named_point_acts),
        cmocka_unit_test(a_stopped_process_goes_on_after_sigcont),
        cmocka_unit_test(a_hanging_process_stays_alive_until_killed),
        cmocka_unit_test(an_environment_with_a_typo_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
