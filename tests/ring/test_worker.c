/*
 * A worker's life: introduction, sleep and wake, leaving, last words.
 *
 * The launcher is role-played here: it creates the segment, relays each DOORBELL as a WAKE, and
 * every worker is a forked child, since worker_start() ties the process to its parent.
 */
#include "ipc/worker.h"

#include "tests/ring/ring_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "procs/check.h"
#include "procs/clock.h"

enum { ROUNDS = 10000, ROUNDS_SANITIZED = 2000, ROUNDS_WITHOUT_BELLS = 10, LATE_MS = 50 };

static struct fixture f;
static char folder[64];

/* What a worker process found, in memory that outlives it. */
struct findings {
    uint64_t late, rounds, longest_ns, total_ns;
};
static struct findings *findings;

struct launcher {
    struct segment segment;
    struct endpoint *endpoint;
    struct launcher_control *orders;
    int fd, relays;
    uint64_t seen[MESSAGE_COUNT];
    char failed_text[MESSAGE_TEXT_BYTES];
};

static int make_folder(void **state)
{
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/mtlaunch-worker-XXXXXX");
    findings = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return findings == MAP_FAILED || !mkdtemp(folder) ? -1 : 0;
}

static int remove_folder(void **state)
{
    (void)state;
    DIR *dir = opendir(folder); /* the workers' logs */
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;)
        (void)unlinkat(dirfd(dir), e->d_name, 0); /* "." and ".." refuse */
    if (dir)
        (void)closedir(dir);
    return rmdir(folder);
}

static struct launcher launcher_open(void)
{
    struct launcher l = {.fd = -1, .relays = 1};
    char address[PLAN_ENDPOINT_BYTES + 8];
    memset(findings, 0, sizeof *findings);
    fixture_fill(&f, 2);
    (void)snprintf(f.at.plan.endpoint, sizeof f.at.plan.endpoint, "%s/s", folder);
    (void)snprintf(address, sizeof address, "ipc://%s", f.at.plan.endpoint);
    f.at.plan.log_bytes_max = 1 << 20;
    assert_int_equal(plan_text_add(&f.at.plan, FIXTURE_PLAN_BYTES, folder, &f.at.plan.log_dir), 0);
    plan_place_regions(&f.at.plan, &f.layout);
    if (segment_create(&f.at.plan, &l.fd) < 0 ||
        segment_attach(&l.segment, l.fd, ROLE_LAUNCHER, 0) < 0)
        fail_msg("%s", error_text());
    l.orders = segment_region(&l.segment, REGION_LAUNCHER_CONTROL, 0);
    return l;
}

/* After the forks: a child must not inherit libzmq's threads half-alive. */
static void launcher_listen(struct launcher *l)
{
    char address[PLAN_ENDPOINT_BYTES + 8];
    (void)snprintf(address, sizeof address, "ipc://%s", f.at.plan.endpoint);
    if (endpoint_bind(&l->endpoint, address) < 0)
        fail_msg("%s", error_text());
}

static void launcher_close(struct launcher *l)
{
    endpoint_close(l->endpoint);
    segment_detach(&l->segment);
    (void)unlink(f.at.plan.endpoint);
    fixture_destroy(&f);
}

static void relay(struct launcher *l)
{
    struct message m;
    char from[MESSAGE_PEER_BYTES], to[MESSAGE_PEER_BYTES];
    while (endpoint_receive(l->endpoint, from, &m) == 1) {
        assert_true(message_allowed(m.type, 'w', 'l'));
        assert_string_equal(m.token, f.at.plan.token);
        assert_int_equal(m.generation, FIXTURE_GENERATION);
        l->seen[m.type]++;
        if (m.type == MESSAGE_FAILED)
            memcpy(l->failed_text, m.text, sizeof m.text);
        if (m.type == MESSAGE_FACT || l->seen[MESSAGE_READY] == 2)
            atomic_store(&l->orders->begin_step, 1);
        if (m.type != MESSAGE_DOORBELL || !l->relays)
            continue;
        (void)snprintf(to, sizeof to, "%.50s#%d", m.text, FIXTURE_GENERATION);
        m.type = MESSAGE_WAKE;
        (void)endpoint_send(l->endpoint, to, &m);
    }
}

/* Relays until all children are gone. Their statuses as fixture_wait() tells them. */
static void launcher_run(struct launcher *l, const pid_t *pids, int *statuses, int n)
{
    uint64_t start = clock_now_ns();
    for (int left = n; left;) {
        relay(l);
        assert_int_equal(endpoint_sleep(l->endpoint, NULL, NULL, 0, 20), 0);
        for (int i = 0; i < n; i++) {
            int status;
            if (statuses[i] < 0 && waitpid(pids[i], &status, WNOHANG) == pids[i]) {
                statuses[i] = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
                left--;
            }
        }
        for (int i = 0; i < n && clock_seconds_since(start) > 120; i++)
            (void)kill(pids[i], SIGKILL);
    }
    relay(l);
}

typedef int (*body)(struct worker *w, uint64_t n);

static pid_t start_worker(struct launcher *l, enum role role, uint32_t index, body run, uint64_t n)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    struct rlimit none = {0, 0};
    char fd[16], number[16], name[] = "worker";
    char *argv[] = {name, fd, number, NULL};
    struct worker w;
    (void)setrlimit(RLIMIT_CORE, &none);
    (void)signal(SIGABRT, SIG_DFL);
    (void)snprintf(fd, sizeof fd, "%d", l->fd);
    (void)snprintf(number, sizeof number, "%u", index);
    int rc = worker_start(&w, role, 3, argv);
    if (rc == 0)
        rc = run(&w, n);
    _exit(worker_finish(&w, rc));
}

static void run_workers(struct launcher *l, const pid_t *pids, int *statuses, int n)
{
    for (int i = 0; i < n; i++)
        statuses[i] = -1;
    launcher_listen(l);
    launcher_run(l, pids, statuses, n);
}

/* -- wake-ups -- */

static int wait_for(struct worker *w, struct ring *ring, enum ring_id id, struct ring_descriptor *d)
{
    int n, rc;
    while ((n = ring_consume(ring, d)) == 0)
        if ((rc = worker_pause(w, (int)id)) < 0)
            return rc;
    return n;
}

static void note_wait(uint64_t since_ns)
{
    uint64_t waited = clock_now_ns() - since_ns;
    findings->rounds++;
    findings->total_ns += waited;
    findings->late += waited > LATE_MS * 1000000ull;
    if (waited > findings->longest_ns)
        findings->longest_ns = waited;
}

/* The ringing end: sends a descriptor, waits for its return. A lost wake-up costs the whole 100 ms.
 */
static int ping(struct worker *w, uint64_t rounds, int bells)
{
    struct ring out, in;
    struct ring_descriptor d = {0};
    segment_ring(&w->segment, RING_MICROBATCH, 0, &out);
    segment_ring(&w->segment, RING_MICROBATCH_RETURN, 0, &in);
    worker_ready(w);
    while (
        !atomic_load(&w->orders->begin_step)) /* the launcher has heard both: a WAKE finds them */
        (void)usleep(1000);
    for (uint64_t i = 0; i < rounds; i++) {
        uint64_t since = clock_now_ns();
        d.page = i;
        if (ring_publish(&out, &d) != 0)
            return error_set(ERROR_FAILED, "full");
        if (bells)
            worker_bell(w, ROLE_GPU, 0);
        int rc = wait_for(w, &in, RING_MICROBATCH_RETURN, &d);
        if (rc < 0)
            return rc;
        if (d.page != i)
            return error_set(ERROR_FAILED, "out of order");
        note_wait(since);
    }
    return 0;
}

static int pong(struct worker *w, uint64_t rounds, int bells)
{
    struct ring in, out;
    struct ring_descriptor d;
    segment_ring(&w->segment, RING_MICROBATCH, 0, &in);
    segment_ring(&w->segment, RING_MICROBATCH_RETURN, 0, &out);
    worker_ready(w);
    for (uint64_t i = 0; i < rounds; i++) {
        int rc = wait_for(w, &in, RING_MICROBATCH, &d);
        if (rc < 0)
            return rc;
        for (volatile uint64_t spin = i % 8 * 400; spin; spin--)
            ; /* so that the publication meets the other end at every stage of its falling asleep */
        if (ring_publish(&out, &d) != 0)
            return error_set(ERROR_FAILED, "full");
        if (bells)
            worker_bell(w, ROLE_IO, 0);
    }
    return 0;
}

static int ping_with_bells(struct worker *w, uint64_t n)
{
    return ping(w, n, 1);
}
static int pong_with_bells(struct worker *w, uint64_t n)
{
    return pong(w, n, 1);
}
static int ping_without_bells(struct worker *w, uint64_t n)
{
    return ping(w, n, 0);
}
static int pong_without_bells(struct worker *w, uint64_t n)
{
    return pong(w, n, 0);
}

static void play(struct launcher *l, body io, body gpu, uint64_t rounds)
{
    int statuses[2];
    pid_t pids[2] = {start_worker(l, ROLE_IO, 0, io, rounds),
                     start_worker(l, ROLE_GPU, 0, gpu, rounds)};
    run_workers(l, pids, statuses, 2);
    if (statuses[0] != 0 || statuses[1] != 0)
        fail_msg("statuses %d and %d: %s", statuses[0], statuses[1], l->failed_text);
    assert_int_equal(findings->rounds, rounds);
    print_message("%llu rounds, mean %.3f ms, longest %.1f ms, over %d ms: %llu; doorbells %llu\n",
                  (unsigned long long)findings->rounds,
                  (double)findings->total_ns / (double)findings->rounds * 1e-6,
                  (double)findings->longest_ns * 1e-6, LATE_MS, (unsigned long long)findings->late,
                  (unsigned long long)l->seen[MESSAGE_DOORBELL]);
}

static void no_wake_up_is_lost_between_two_processes(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    play(&l, ping_with_bells, pong_with_bells, FIXTURE_SANITIZED ? ROUNDS_SANITIZED : ROUNDS);
    /* a starved machine is late now and then; without bells nearly every round is (next test) */
    assert_true(findings->late <= findings->rounds / 50);
    assert_true(l.seen[MESSAGE_DOORBELL] > findings->rounds); /* they did sleep */
    launcher_close(&l);
}

/* The same count with bells off: the test above can fail, and the fallback works. */
static void without_bells_every_round_is_late_but_none_is_lost(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    play(&l, ping_without_bells, pong_without_bells, ROUNDS_WITHOUT_BELLS);
    assert_true(findings->late >= findings->rounds * 8 / 10);
    assert_int_equal(l.seen[MESSAGE_DOORBELL], 0);
    launcher_close(&l);
}

static void a_launcher_that_does_not_relay_costs_only_time(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    l.relays = 0;
    play(&l, ping_with_bells, pong_with_bells, ROUNDS_WITHOUT_BELLS);
    assert_true(findings->late > 0);
    assert_true(findings->longest_ns < 2000 * 1000000ull);
    launcher_close(&l);
}

static int bell_an_awake_worker(struct worker *w, uint64_t n)
{
    worker_ready(w);
    for (uint64_t i = 0; i < n; i++)
        worker_bell(w, ROLE_GPU, 0);
    worker_fact(w); /* arrives after all bells; messages still under way at exit may be lost */
    while (!atomic_load(&w->orders->begin_step))
        if (worker_pause(w, WORKER_WAIT_OTHER) < 0)
            return error_set(ERROR_FAILED, "pause");
    return 0;
}

static void nobody_rings_for_a_worker_that_is_awake(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    int status;
    pid_t pid = start_worker(&l, ROLE_IO, 0, bell_an_awake_worker, 100);
    run_workers(&l, &pid, &status, 1);
    assert_int_equal(status, 0);
    assert_int_equal(l.seen[MESSAGE_HELLO], 1);
    assert_int_equal(l.seen[MESSAGE_READY], 1);
    assert_int_equal(l.seen[MESSAGE_FACT], 1);
    assert_int_equal(l.seen[MESSAGE_DOORBELL], 0);
    launcher_close(&l);
}

static int wait_for_event(struct worker *w, uint64_t n)
{
    uint64_t one = 1, start = clock_now_ns();
    (void)n;
    w->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    worker_ready(w);
    if (worker_pause(w, RING_WEIGHTS) < 0 || clock_seconds_since(start) > 0.05)
        return error_set(ERROR_FAILED, "the first pause slept");
    if (!atomic_load(&w->self->sleeping))
        return error_set(ERROR_FAILED, "the first pause did not raise `sleeping`");
    if (worker_pause(w, RING_WEIGHTS) < 0 || clock_seconds_since(start) < 0.09)
        return error_set(ERROR_FAILED, "the second pause did not sleep");
    if (atomic_load(&w->self->sleeping))
        return error_set(ERROR_FAILED, "awake, but `sleeping` is up");
    if (atomic_load(&w->self->wait_ns[RING_WEIGHTS]) < 90000000u ||
        atomic_load(&w->self->wait_ns[RING_STATE]))
        return error_set(ERROR_FAILED, "the wait was not counted to its ring");
    if (write(w->event_fd, &one, sizeof one) != sizeof one)
        return error_set(ERROR_FAILED, "eventfd");
    start = clock_now_ns();
    for (int i = 0; i < 20; i++)
        if (worker_pause(w, WORKER_WAIT_OTHER) < 0)
            return error_set(ERROR_FAILED, "pause");
    return clock_seconds_since(start) > 0.5 ? error_set(ERROR_FAILED, "slept past the event") : 0;
}

static void a_pause_arms_first_sleeps_second_and_hears_the_event_descriptor(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    int status;
    pid_t pid = start_worker(&l, ROLE_GPU, 0, wait_for_event, 0);
    run_workers(&l, &pid, &status, 1);
    if (status != 0)
        fail_msg("%d: %s", status, l.failed_text);
    launcher_close(&l);
}

/* -- the life -- */

static int pause_for_ever(struct worker *w, uint64_t n)
{
    int rc = 0;
    (void)n;
    worker_ready(w);
    while (rc == 0)
        rc = worker_pause(w, WORKER_WAIT_OTHER);
    return rc;
}

static void workers_introduce_themselves_and_leave_when_told(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    int statuses[4] = {-1, -1, -1, -1};
    pid_t pids[4];
    for (int i = 0; i < 4; i++)
        pids[i] = start_worker(&l, i < 2 ? (enum role)(ROLE_IO + i) : ROLE_OPT,
                               i < 2 ? 0 : (uint32_t)i - 2, pause_for_ever, 0);
    launcher_listen(&l);
    while (l.seen[MESSAGE_READY] < 4) {
        relay(&l);
        assert_int_equal(endpoint_sleep(l.endpoint, NULL, NULL, 0, 10), 0);
    }
    for (int i = 0; i < 4; i++) {
        enum region_id region =
            i < 2 ? (enum region_id)(REGION_IO_CONTROL + i) : REGION_OPT_CONTROL;
        const struct worker_control *c =
            segment_region(&l.segment, region, i < 2 ? 0 : (uint32_t)i - 2);
        assert_int_equal(c->magic, CONTROL_MAGIC);
        assert_int_equal(c->role, i < 2 ? ROLE_IO + i : ROLE_OPT);
        assert_int_equal(c->index, i < 2 ? 0 : i - 2);
        assert_int_equal(c->pid, pids[i]);
        assert_int_equal(c->incarnation, FIXTURE_GENERATION);
        assert_int_equal(atomic_load(&c->ready), FIXTURE_GENERATION);
    }
    atomic_store(&l.orders->stopping, 1); /* without a message: they look within 100 ms */
    uint64_t start = clock_now_ns();
    launcher_run(&l, pids, statuses, 4);
    assert_true(clock_seconds_since(start) < 1);
    for (int i = 0; i < 4; i++)
        assert_int_equal(statuses[i], ERROR_STOPPED);
    assert_int_equal(l.seen[MESSAGE_HELLO], 4);
    assert_int_equal(l.seen[MESSAGE_FAILED], 0);
    launcher_close(&l);
}

static int fail_by_error(struct worker *w, uint64_t n)
{
    (void)w;
    (void)n;
    return error_set(ERROR_FIT, "the store: no space");
}

static void an_error_reaches_the_control_page_and_the_launcher(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    int status;
    pid_t pid = start_worker(&l, ROLE_OPT, 1, fail_by_error, 0);
    run_workers(&l, &pid, &status, 1);
    const struct worker_control *c = segment_region(&l.segment, REGION_OPT_CONTROL, 1);
    assert_int_equal(status, ERROR_FIT);
    assert_int_equal(atomic_load(&c->error_kind), ERROR_FIT);
    assert_string_equal(c->error, "the store: no space");
    launcher_close(&l);
}

static int fail_by_check(struct worker *w, uint64_t n)
{
    CHECK(w == NULL && n == 12345);
    return 0;
}

static void a_failed_check_leaves_its_text_in_shared_memory(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    int status;
    pid_t pid = start_worker(&l, ROLE_GPU, 0, fail_by_check, 0);
    run_workers(&l, &pid, &status, 1);
    const struct worker_control *c = segment_region(&l.segment, REGION_GPU_CONTROL, 0);
    assert_int_equal(status, 1000 + SIGABRT);
    assert_non_null(strstr(c->panic, "CHECK(w == NULL && n == 12345) failed"));
    launcher_close(&l);
}

static int note_signals(struct worker *w, uint64_t n)
{
    worker_ready(w);
    (void)raise(SIGINT);
    (void)raise(SIGHUP);
    (void)raise(SIGPIPE);
    return (int)n;
}

static void terminal_signals_do_not_end_a_worker(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    int status;
    pid_t pid = start_worker(&l, ROLE_IO, 0, note_signals, 0);
    run_workers(&l, &pid, &status, 1);
    assert_int_equal(status, 0);
    launcher_close(&l);
}

/* worker_start() in a child that dies of nothing but its own _exit; its status and error text. */
static int start_status(int argc, char **argv, enum role role, const char *text)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct worker w;
        int rc = worker_start(&w, role, argc, argv);
        int fine = rc < 0 && strstr(error_text(), text) != NULL;
        if (!fine)
            (void)fprintf(stderr, "expected \"%s\", found %d \"%s\"\n", text, rc, error_text());
        (void)close(STDERR_FILENO);
        _exit(worker_finish(&w, rc) + (fine ? 0 : 100));
    }
    return fixture_wait(pid);
}

static void a_worker_started_wrongly_says_so(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    char fd[16], name[] = "opt_worker", zero[] = "0", two[] = "2", none[] = "999";
    (void)snprintf(fd, sizeof fd, "%d", l.fd);
    assert_int_equal(start_status(1, (char *[]){name, NULL}, ROLE_OPT, "is started by mtlaunch"),
                     ERROR_USER);
    assert_int_equal(
        start_status(3, (char *[]){name, none, zero, NULL}, ROLE_OPT, "Bad file descriptor"),
        ERROR_FAILED);
    assert_int_equal(
        start_status(3, (char *[]){name, fd, two, NULL}, ROLE_OPT, "opt_worker 2 of 2"),
        ERROR_FAILED);
    launcher_close(&l);
}

static void a_worker_whose_parent_is_not_the_launcher_leaves(void **state)
{
    (void)state;
    struct launcher l = launcher_open();
    char fd[16], name[] = "io_worker", zero[] = "0";
    char *argv[] = {name, fd, zero, NULL};
    (void)snprintf(fd, sizeof fd, "%d", l.fd);
    pid_t pid = fork();
    if (pid == 0) /* as if the launcher had died between fork and prctl */
        _exit(start_status(3, argv, ROLE_IO, "the launcher is gone"));
    assert_int_equal(fixture_wait(pid), ERROR_FAILED);
    launcher_close(&l);
}

/* The launcher is killed: its worker, even if it never looks up from its work, goes with it. */
static int work_without_looking_up(struct worker *w, uint64_t n)
{
    worker_ready(w);
    (void)usleep((useconds_t)n);
    return 0;
}

static void a_worker_dies_with_its_launcher(void **state)
{
    (void)state;
    pid_t *worker = (pid_t *)(void *)(findings + 1);
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1),
                     0); /* so that the orphan is ours to wait for */
    *worker = 0;
    pid_t pid = fork();
    if (pid == 0) {
        struct launcher l = launcher_open();
        *worker = start_worker(&l, ROLE_IO, 0, work_without_looking_up, 20000000);
        const struct worker_control *c = segment_region(&l.segment, REGION_IO_CONTROL, 0);
        while (!atomic_load(&c->ready))
            (void)usleep(1000);
        (void)raise(SIGKILL);
    }
    assert_int_equal(fixture_wait(pid), 1000 + SIGKILL);
    uint64_t start = clock_now_ns();
    assert_int_equal(fixture_wait(*worker), 1000 + SIGKILL);
    assert_true(clock_seconds_since(start) < 5);
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workers_introduce_themselves_and_leave_when_told),
        cmocka_unit_test(an_error_reaches_the_control_page_and_the_launcher),
        cmocka_unit_test(a_failed_check_leaves_its_text_in_shared_memory),
        cmocka_unit_test(terminal_signals_do_not_end_a_worker),
        cmocka_unit_test(a_worker_started_wrongly_says_so),
        cmocka_unit_test(a_worker_whose_parent_is_not_the_launcher_leaves),
        cmocka_unit_test(a_worker_dies_with_its_launcher),
        cmocka_unit_test(a_pause_arms_first_sleeps_second_and_hears_the_event_descriptor),
        cmocka_unit_test(nobody_rings_for_a_worker_that_is_awake),
        cmocka_unit_test(without_bells_every_round_is_late_but_none_is_lost),
        cmocka_unit_test(a_launcher_that_does_not_relay_costs_only_time),
        cmocka_unit_test(no_wake_up_is_lost_between_two_processes),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
