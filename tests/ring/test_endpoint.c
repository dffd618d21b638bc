/* The control channel: delivery, garbage, absent peers, signals, and a close that never hangs. */
#include "ipc/endpoint.h"

#include "tests/ring/ring_fixture.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <zmq.h>

#include "procs/clock.h"

static char folder[64], address[96];

static int make_folder(void **state)
{
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/mtlaunch-endpoint-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    (void)snprintf(address, sizeof address, "ipc://%s/s", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    (void)unlink(address + strlen("ipc://")); /* libzmq removed it already, as a rule */
    return rmdir(folder);
}

static struct message text_message(enum message_type type, uint64_t a, const char *text)
{
    struct message m = {.type = type, .generation = 1, .a = a};
    (void)snprintf(m.text, sizeof m.text, "%s", text);
    return m;
}

/* 1 when a message came within the time. */
static int receive_within(struct endpoint *e, char *from, struct message *m, int ms)
{
    uint64_t start = clock_now_ns();
    while (clock_seconds_since(start) * 1e3 < ms) {
        if (endpoint_receive(e, from, m) == 1)
            return 1;
        assert_int_equal(endpoint_sleep(e, NULL, NULL, 0, 10), 0);
    }
    return 0;
}

struct pair {
    struct endpoint *launcher, *worker;
};

static struct pair open_pair(void)
{
    struct pair p;
    struct message m = text_message(MESSAGE_HELLO, 0, "");
    char from[MESSAGE_PEER_BYTES];
    if (endpoint_bind(&p.launcher, address) < 0 ||
        endpoint_connect(&p.worker, address, "gpu_worker.0") < 0)
        fail_msg("%s", error_text());
    assert_int_equal(endpoint_send(p.worker, NULL, &m), 0);
    assert_true(receive_within(p.launcher, from, &m, 5000));
    assert_string_equal(from, "gpu_worker.0");
    return p;
}

static void close_pair(struct pair p)
{
    endpoint_close(p.worker);
    endpoint_close(p.launcher);
}

static void messages_go_both_ways_with_the_senders_name(void **state)
{
    (void)state;
    struct pair p = open_pair();
    char from[MESSAGE_PEER_BYTES];
    for (uint64_t i = 0; i < 100; i++) {
        struct message out = text_message(MESSAGE_DOORBELL, i, "io_worker.0"), in;
        assert_int_equal(endpoint_send(p.worker, NULL, &out), 0);
        assert_true(receive_within(p.launcher, from, &in, 5000));
        assert_string_equal(from, "gpu_worker.0");
        assert_int_equal(in.a, i);
        assert_string_equal(in.text, "io_worker.0");
        out = text_message(MESSAGE_WAKE, i + 1, "");
        assert_int_equal(endpoint_send(p.launcher, from, &out), 0);
        assert_true(receive_within(p.worker, NULL, &in, 5000));
        assert_int_equal(in.type, MESSAGE_WAKE);
        assert_int_equal(in.a, i + 1);
    }
    assert_int_equal(endpoint_dropped(p.launcher) + endpoint_dropped(p.worker), 0);
    close_pair(p);
}

static void a_restarted_worker_takes_over_its_name(void **state)
{
    (void)state;
    struct pair p = open_pair();
    struct endpoint *again = NULL;
    struct message m = text_message(MESSAGE_HELLO, 2, "");
    char from[MESSAGE_PEER_BYTES];
    assert_int_equal(endpoint_connect(&again, address, "gpu_worker.0"), 0);
    assert_int_equal(endpoint_send(again, NULL, &m), 0);
    assert_true(receive_within(p.launcher, from, &m, 5000));
    m = text_message(MESSAGE_WAKE, 3, "");
    assert_int_equal(endpoint_send(p.launcher, "gpu_worker.0", &m), 0);
    assert_true(receive_within(again, NULL, &m, 5000));
    assert_false(receive_within(p.worker, NULL, &m, 50));
    endpoint_close(again);
    close_pair(p);
}

static void a_message_to_an_absent_worker_is_counted_and_does_not_block(void **state)
{
    (void)state;
    struct pair p = open_pair();
    struct message m = text_message(MESSAGE_WAKE, 0, "");
    uint64_t start = clock_now_ns();
    for (int i = 0; i < 1000; i++)
        assert_int_equal(endpoint_send(p.launcher, "opt_worker.9", &m), -EAGAIN);
    assert_true(clock_seconds_since(start) < 1);
    assert_int_equal(endpoint_dropped(p.launcher), 1000);
    assert_int_equal(endpoint_send(p.launcher, "gpu_worker.0", &m), 0); /* and harms no other */
    assert_true(receive_within(p.worker, NULL, &m, 5000));
    close_pair(p);
}

static void a_worker_without_a_launcher_does_not_block(void **state)
{
    (void)state;
    struct endpoint *e = NULL;
    struct message m = text_message(MESSAGE_FACT, 0, "");
    uint64_t start = clock_now_ns(), dropped = 0;
    assert_int_equal(endpoint_connect(&e, address, "io_worker.0"), 0);
    for (int i = 0; i < 20000; i++)
        dropped += endpoint_send(e, NULL, &m) == -EAGAIN;
    assert_true(dropped > 0 && dropped < 20000); /* the queue has a limit, and it is used */
    assert_int_equal(endpoint_dropped(e), dropped);
    assert_false(receive_within(e, NULL, &m, 20));
    endpoint_close(e);
    assert_true(clock_seconds_since(start) < 5);
}

static void a_worker_that_does_not_read_does_not_block_the_launcher(void **state)
{
    (void)state;
    struct pair p = open_pair();
    struct message m = text_message(MESSAGE_WAKE, 0, "");
    memset(m.text, 'x', sizeof m.text - 1);
    uint64_t start = clock_now_ns(), dropped = 0;
    for (int i = 0; i < 20000; i++)
        dropped += endpoint_send(p.launcher, "gpu_worker.0", &m) == -EAGAIN;
    assert_true(dropped > 0);
    assert_int_equal(endpoint_dropped(p.launcher), dropped);
    close_pair(p);
    assert_true(clock_seconds_since(start) < 5);
}

/* C36 */
static void closing_with_queued_messages_does_not_hang(void **state)
{
    (void)state;
    for (int order = 0; order < 2; order++) {
        struct pair p = open_pair();
        struct message m = text_message(MESSAGE_FACT, 0, "queued");
        for (int i = 0; i < 3000; i++) {
            (void)endpoint_send(p.worker, NULL, &m);
            (void)endpoint_send(p.launcher, "gpu_worker.0", &m);
        }
        uint64_t start = clock_now_ns();
        endpoint_close(order ? p.worker : p.launcher);
        endpoint_close(order ? p.launcher : p.worker);
        assert_true(clock_seconds_since(start) < 1);
    }
    struct endpoint *alone = NULL; /* connected to nobody, messages waiting */
    struct message m = text_message(MESSAGE_FACT, 0, "queued");
    assert_int_equal(endpoint_connect(&alone, address, "io_worker.0"), 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(endpoint_send(alone, NULL, &m), 0);
    uint64_t start = clock_now_ns();
    endpoint_close(alone);
    endpoint_close(NULL);
    assert_true(clock_seconds_since(start) < 1);
}

/* -- garbage -- */

static void send_raw(void *socket, const void *bytes, size_t n, int flags)
{
    assert_int_equal(zmq_send(socket, bytes, n, flags), n);
}

static void send_garbage(void *raw, int to_dealer)
{
    static unsigned char noise[MESSAGE_BYTES_MAX];
    unsigned char good[MESSAGE_BYTES_MAX];
    const struct message m = text_message(MESSAGE_STOP, 1, "");
    size_t n = (size_t)message_encode(&m, good, sizeof good);
    const struct {
        const void *bytes;
        size_t n;
    } garbage[] = {{"", 0}, {"hello", 5}, {noise, sizeof noise}, {good, n - 1}};
    memset(noise, 0xdd, sizeof noise);
    for (size_t i = 0; i < 4; i++) {
        if (to_dealer)
            send_raw(raw, "gpu_worker.0", 12, ZMQ_SNDMORE);
        send_raw(raw, garbage[i].bytes, garbage[i].n, 0);
    }
    if (to_dealer)
        send_raw(raw, "gpu_worker.0", 12, ZMQ_SNDMORE);
    send_raw(raw, good, n, ZMQ_SNDMORE); /* ours, and two frames that are not */
    send_raw(raw, "", 0, ZMQ_SNDMORE);
    send_raw(raw, good, n, 0);
}

static void garbage_to_the_launcher_is_dropped_and_counted(void **state)
{
    (void)state;
    struct pair p = open_pair();
    char from[MESSAGE_PEER_BYTES];
    struct message m;
    void *context = zmq_ctx_new(), *raw = zmq_socket(context, ZMQ_DEALER);
    int none = 0;
    assert_int_equal(zmq_setsockopt(raw, ZMQ_LINGER, &none, sizeof none), 0);
    assert_int_equal(zmq_connect(raw, address), 0);
    send_garbage(raw, 0);
    assert_false(receive_within(p.launcher, from, &m, 200));
    assert_int_equal(endpoint_dropped(p.launcher), 5);
    m = text_message(MESSAGE_STOP, 5, "after");
    unsigned char bytes[MESSAGE_BYTES_MAX];
    send_raw(raw, bytes, (size_t)message_encode(&m, bytes, sizeof bytes), 0);
    assert_true(receive_within(p.launcher, from, &m, 5000)); /* a nameless peer is heard */
    assert_string_equal(from, "");
    assert_string_equal(m.text, "after");
    (void)zmq_close(raw);
    (void)zmq_ctx_term(context);
    close_pair(p);
}

static void a_long_name_is_cut_and_harms_nothing(void **state)
{
    (void)state;
    struct endpoint *e = NULL, *launcher = NULL;
    char name[256], from[MESSAGE_PEER_BYTES + 1];
    struct message m = text_message(MESSAGE_STOP, 1, "");
    memset(name, 'n', sizeof name);
    assert_int_equal(endpoint_bind(&launcher, address), 0);
    for (size_t length = MESSAGE_PEER_BYTES - 2; length < 256; length += length < 66 ? 1 : 63) {
        name[length] = '\0';
        from[MESSAGE_PEER_BYTES] = 0x5a;
        assert_int_equal(endpoint_connect(&e, address, name), 0);
        assert_int_equal(endpoint_send(e, NULL, &m), 0);
        assert_true(receive_within(launcher, from, &m, 5000));
        assert_int_equal(strlen(from),
                         length < MESSAGE_PEER_BYTES ? length : MESSAGE_PEER_BYTES - 1);
        assert_int_equal(from[MESSAGE_PEER_BYTES], 0x5a);
        endpoint_close(e);
        name[length] = 'n';
    }
    endpoint_close(launcher);
}

static void an_oversized_message_does_not_arrive(void **state)
{
    (void)state;
    static unsigned char big[4 * MESSAGE_BYTES_MAX];
    struct pair p = open_pair();
    char from[MESSAGE_PEER_BYTES];
    struct message m;
    void *context = zmq_ctx_new(), *raw = zmq_socket(context, ZMQ_DEALER);
    int none = 0;
    assert_int_equal(zmq_setsockopt(raw, ZMQ_LINGER, &none, sizeof none), 0);
    assert_int_equal(zmq_connect(raw, address), 0);
    send_raw(raw, big, sizeof big, 0);
    assert_false(receive_within(p.launcher, from, &m, 200));
    m = text_message(MESSAGE_FACT, 1, "");
    assert_int_equal(endpoint_send(p.worker, NULL, &m), 0); /* others are still served */
    assert_true(receive_within(p.launcher, from, &m, 5000));
    (void)zmq_close(raw);
    (void)zmq_ctx_term(context);
    close_pair(p);
}

static void garbage_to_a_worker_is_dropped_and_counted(void **state)
{
    (void)state;
    struct endpoint *worker = NULL;
    struct message m = text_message(MESSAGE_HELLO, 0, "");
    unsigned char bytes[MESSAGE_BYTES_MAX];
    void *context = zmq_ctx_new(), *raw = zmq_socket(context, ZMQ_ROUTER);
    int none = 0;
    assert_int_equal(zmq_setsockopt(raw, ZMQ_LINGER, &none, sizeof none), 0);
    assert_int_equal(zmq_bind(raw, address), 0);
    assert_int_equal(endpoint_connect(&worker, address, "gpu_worker.0"), 0);
    assert_int_equal(endpoint_send(worker, NULL, &m), 0);
    assert_int_equal(zmq_recv(raw, bytes, sizeof bytes, 0), 12); /* the name: it is connected now */
    send_garbage(raw, 1);
    assert_false(receive_within(worker, NULL, &m, 200));
    assert_int_equal(endpoint_dropped(worker), 5);
    endpoint_close(worker);
    (void)zmq_close(raw);
    (void)zmq_ctx_term(context);
}

/* -- sleeping and signals -- */

static void sleeping_ends_with_a_message_a_descriptor_or_the_time(void **state)
{
    (void)state;
    struct pair p = open_pair();
    int fds[2] = {eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC)}, ready[2] = {9, 9};
    uint64_t one = 1, start = clock_now_ns();
    assert_int_equal(endpoint_sleep(p.launcher, fds, ready, 2, 30), 0);
    assert_true(clock_seconds_since(start) > 0.025);
    assert_true(ready[0] == 0 && ready[1] == 0);
    assert_int_equal(write(fds[1], &one, sizeof one), sizeof one);
    start = clock_now_ns();
    assert_int_equal(endpoint_sleep(p.launcher, fds, ready, 2, 10000), 0);
    assert_true(ready[0] == 0 && ready[1] == 1);
    struct message m = text_message(MESSAGE_FACT, 0, "");
    assert_int_equal(endpoint_send(p.worker, NULL, &m), 0);
    assert_int_equal(endpoint_sleep(p.launcher, fds, ready, 1, 10000), 0);
    assert_true(clock_seconds_since(start) < 5);
    assert_int_equal(ready[0], 0);
    (void)close(fds[1]);
    (void)close(fds[0]);
    close_pair(p);
}

static void a_descriptor_that_is_not_open_is_not_slept_upon(void **state)
{
    (void)state;
    struct pair p = open_pair();
    int fd = 1000, ready = 0, rc = endpoint_sleep(p.launcher, &fd, &ready, 1, 50);
    assert_true(rc < 0 || ready == 1);
    close_pair(p);
}

static void on_alarm(int signal)
{
    (void)signal;
}

static void signals_neither_tear_nor_lose_messages(void **state)
{
    (void)state;
    struct pair p = open_pair();
    struct sigaction action = {.sa_handler = on_alarm}, old; /* no SA_RESTART: calls give EINTR */
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    char from[MESSAGE_PEER_BYTES];
    struct message m;
    assert_int_equal(sigaction(SIGALRM, &action, &old), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    for (uint64_t i = 0; i < 3000; i++) {
        m = text_message(MESSAGE_DOORBELL, i, "x");
        assert_int_equal(endpoint_send(p.worker, NULL, &m), 0);
        assert_true(receive_within(p.launcher, from, &m, 5000));
        assert_int_equal(m.a, i);
        m = text_message(MESSAGE_WAKE, i, "y");
        assert_int_equal(endpoint_send(p.launcher, from, &m), 0);
        assert_true(receive_within(p.worker, NULL, &m, 5000));
        assert_int_equal(m.a, i);
    }
    assert_int_equal(endpoint_dropped(p.launcher) + endpoint_dropped(p.worker), 0);
    close_pair(p); /* under signals too */
    (void)setitimer(ITIMER_REAL, &never, NULL);
    (void)sigaction(SIGALRM, &old, NULL);
}

/* -- addresses -- */

/* A socket path of just `n` bytes. */
static const char *path_of(char out[256], size_t n)
{
    size_t used = (size_t)snprintf(out, 256, "ipc://%s/", folder);
    memset(out + used, 's', n - (used - strlen("ipc://")));
    out[n + strlen("ipc://")] = '\0';
    return out;
}

static void a_path_too_long_fails_with_both_lengths(void **state)
{
    (void)state;
    struct endpoint *e = NULL;
    char path[256];
    assert_int_equal(endpoint_bind(&e, path_of(path, PLAN_ENDPOINT_BYTES)), -ERROR_FAILED);
    assert_null(e);
    fixture_expect_text("a path of 108 bytes, at most 107 expected");
    fixture_expect_text(path);
    fixture_expect_text("hint: ");
    assert_int_equal(endpoint_connect(&e, path, "io_worker.0"), -ERROR_FAILED);
    assert_null(e);
    fixture_expect_text("a path of 108 bytes, at most 107 expected");
    assert_int_equal(endpoint_bind(&e, path_of(path, PLAN_ENDPOINT_BYTES - 1)), 0);
    endpoint_close(e);
    (void)unlink(path + strlen("ipc://"));
}

static void an_address_that_cannot_be_bound_is_named(void **state)
{
    (void)state;
    struct endpoint *e = NULL;
    assert_int_equal(endpoint_bind(&e, "ipc:///nonexistent/folder/s"), -ERROR_FAILED);
    assert_null(e);
    fixture_expect_text("control channel ipc:///nonexistent/folder/s: bind: No such file");
    assert_int_equal(endpoint_connect(&e, "nonsense", "io_worker.0"), -ERROR_FAILED);
    fixture_expect_text("control channel nonsense: connect: ");
    assert_int_equal(endpoint_connect(&e, address, ""), -ERROR_FAILED);
    fixture_expect_text("routing id");
    assert_null(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_go_both_ways_with_the_senders_name),
        cmocka_unit_test(a_restarted_worker_takes_over_its_name),
        cmocka_unit_test(a_message_to_an_absent_worker_is_counted_and_does_not_block),
        cmocka_unit_test(a_worker_without_a_launcher_does_not_block),
        cmocka_unit_test(a_worker_that_does_not_read_does_not_block_the_launcher),
        cmocka_unit_test(closing_with_queued_messages_does_not_hang),
        cmocka_unit_test(garbage_to_the_launcher_is_dropped_and_counted),
        cmocka_unit_test(a_long_name_is_cut_and_harms_nothing),
        cmocka_unit_test(an_oversized_message_does_not_arrive),
        cmocka_unit_test(garbage_to_a_worker_is_dropped_and_counted),
        cmocka_unit_test(sleeping_ends_with_a_message_a_descriptor_or_the_time),
        cmocka_unit_test(a_descriptor_that_is_not_open_is_not_slept_upon),
        cmocka_unit_test(signals_neither_tear_nor_lose_messages),
        cmocka_unit_test(a_path_too_long_fails_with_both_lengths),
        cmocka_unit_test(an_address_that_cannot_be_bound_is_named),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
