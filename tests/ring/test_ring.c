/* The ring: order, bounds, the hand-over of payload between threads and processes, damage refused.
 */
#include "ipc/ring.h"

#include "tests/ring/ring_fixture.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { DEPTH = 16, FRAMES = 16, FRAME_WORDS = 24, GENERATION = 3 };
static const uint64_t DESCRIPTORS = 1000000;

/* One lending ring, its RETURN ring and the frames that they lend, in memory that a fork shares. */
struct bench {
    struct ring lend, give_back;
    uint64_t (*frames)[FRAME_WORDS];
    void *memory;
    uint64_t bytes;
};

static void ring_place(struct ring *ring, unsigned char **at)
{
    ring->producer = (struct ring_producer_area *)(void *)*at;
    *at += RING_CURSOR_BYTES + 4096 * ((DEPTH * RING_LINE_BYTES + 4095) / 4096);
    ring->consumer = (struct ring_consumer_area *)(void *)*at;
    *at += RING_CURSOR_BYTES;
    ring->depth = DEPTH;
    ring->generation = GENERATION;
}

static struct bench bench_open(void)
{
    struct bench b = {.bytes = 1 << 16};
    b.memory = mmap(NULL, b.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(b.memory != MAP_FAILED);
    unsigned char *at = b.memory;
    ring_place(&b.lend, &at);
    ring_place(&b.give_back, &at);
    b.frames = (uint64_t(*)[FRAME_WORDS])(void *)at;
    assert_true((uint64_t)(at - (unsigned char *)b.memory) + sizeof b.frames[0] * FRAMES <=
                b.bytes);
    return b;
}

static void bench_close(struct bench *b)
{
    (void)munmap(b->memory, b->bytes);
}

static void publish_n(struct ring *ring, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        struct ring_descriptor d = {.page = first + i, .step = 9, .hash = 1};
        assert_int_equal(ring_publish(ring, &d), 0);
    }
}

static void consume_n(struct ring *ring, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        struct ring_descriptor d;
        assert_int_equal(ring_consume(ring, &d), 1);
        assert_int_equal(d.page, first + i);
        assert_int_equal(d.step, 9);
        assert_int_equal(d.generation, GENERATION);
    }
}

static void an_empty_ring_gives_nothing(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    assert_int_equal(ring_consume(&b.lend, &d), 0);
    assert_int_equal(ring_waiting(&b.lend), 0);
    bench_close(&b);
}

static void a_full_ring_refuses_until_one_is_consumed(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d = {.page = 99};
    publish_n(&b.lend, 0, DEPTH);
    assert_int_equal(ring_waiting(&b.lend), DEPTH);
    assert_int_equal(ring_publish(&b.lend, &d), -EAGAIN);
    assert_int_equal(ring_waiting(&b.lend), DEPTH);
    consume_n(&b.lend, 0, 1);
    publish_n(&b.lend, DEPTH, 1);
    assert_int_equal(ring_publish(&b.lend, &d), -EAGAIN);
    consume_n(&b.lend, 1, DEPTH);
    assert_int_equal(ring_consume(&b.lend, &d), 0);
    bench_close(&b);
}

static void order_survives_every_fill_level_across_the_wrap(void **state)
{
    (void)state;
    struct bench b = bench_open();
    uint64_t next = 0;
    for (uint64_t lap = 0; lap < 5; lap++)
        for (uint64_t n = 1; n <= DEPTH; n++, next += n - 1) {
            publish_n(&b.lend, next, n);
            assert_int_equal(ring_waiting(&b.lend), n);
            consume_n(&b.lend, next, n);
        }
    bench_close(&b);
}

static void cursors_run_over_the_end_of_64_bits(void **state)
{
    (void)state;
    struct bench b = bench_open();
    atomic_store(&b.lend.producer->head, UINT64_MAX - 2);
    atomic_store(&b.lend.consumer->tail, UINT64_MAX - 2);
    struct ring_descriptor d = {0};
    publish_n(&b.lend, 0, DEPTH);
    assert_int_equal(ring_publish(&b.lend, &d), -EAGAIN);
    assert_int_equal(ring_waiting(&b.lend), DEPTH);
    consume_n(&b.lend, 0, DEPTH);
    assert_int_equal(ring_consume(&b.lend, &d), 0);
    bench_close(&b);
}

static void the_producer_region_holds_cursor_and_descriptors(void **state)
{
    (void)state;
    assert_int_equal(ring_producer_bytes(DEPTH), 4096 + DEPTH * 64);
    assert_int_equal(sizeof(struct ring_consumer_area), 4096);
}

/* -- a hand-over -- */

static uint64_t word(uint64_t count, uint64_t i)
{
    return (count + 1) * 0x9e3779b97f4a7c15u + i;
}

/* 0, or what went wrong: asserts may not leave a thread or a forked process. */
static const char *produce(struct bench *b, uint64_t n)
{
    uint32_t free_frames[FRAMES], n_free = FRAMES;
    for (uint32_t i = 0; i < FRAMES; i++)
        free_frames[i] = i;
    for (uint64_t count = 0; count < n;) {
        struct ring_descriptor d;
        int rc = ring_consume(&b->give_back, &d);
        if (rc < 0)
            return "RETURN damaged";
        if (rc == 1)
            free_frames[n_free++] = d.frame;
        if (rc == 0 && n_free == 0) {
            (void)sched_yield();
            continue;
        }
        if (n_free == 0)
            continue;
        uint32_t f = free_frames[--n_free];
        for (uint64_t i = 0; i < FRAME_WORDS; i++)
            b->frames[f][i] = word(count, i);
        d = (struct ring_descriptor){.frame = f, .page = count};
        if (ring_publish(&b->lend, &d) != 0)
            return "a ring as deep as its pool was full";
        count++;
    }
    return NULL;
}

static const char *give_back(struct bench *b, uint32_t frame)
{
    struct ring_descriptor d = {.frame = frame};
    return ring_publish(&b->give_back, &d) == 0 ? NULL : "RETURN full";
}

/* Returns frames in pairs, the later first: any order is allowed. */
static const char *borrow(struct bench *b, uint64_t n)
{
    uint32_t held = FRAMES;
    for (uint64_t count = 0; count < n;) {
        struct ring_descriptor d;
        int rc = ring_consume(&b->lend, &d);
        if (rc < 0)
            return "descriptor refused";
        if (rc == 0) {
            (void)sched_yield();
            continue;
        }
        if (d.page != count++)
            return "out of order";
        for (uint64_t i = 0; i < FRAME_WORDS; i++)
            if (b->frames[d.frame][i] != word(d.page, i))
                return "payload is not what was published";
        if (held == FRAMES) {
            held = d.frame;
            continue;
        }
        const char *wrong = give_back(b, d.frame);
        wrong = wrong ? wrong : give_back(b, held);
        if (wrong)
            return wrong;
        held = FRAMES;
    }
    return NULL;
}

static void a_million_descriptors_pass_between_two_processes(void **state)
{
    (void)state;
    struct bench b = bench_open();
    pid_t pid = fork();
    if (pid == 0) {
        const char *wrong = produce(&b, DESCRIPTORS);
        if (wrong)
            (void)fprintf(stderr, "producer: %s: %s\n", wrong, error_text());
        _exit(wrong ? 1 : 0);
    }
    const char *wrong = borrow(&b, DESCRIPTORS);
    if (wrong) {
        (void)kill(pid, SIGKILL);
        (void)fixture_wait(pid);
        fail_msg("%s: %s", wrong, error_text());
    }
    assert_int_equal(fixture_wait(pid), 0);
    assert_int_equal(ring_waiting(&b.lend), 0);
    bench_close(&b);
}

static void *produce_all(void *bench)
{
    return (void *)(uintptr_t)produce(bench, DESCRIPTORS);
}

static void *borrow_all(void *bench)
{
    const char *wrong = borrow(bench, DESCRIPTORS);
    if (wrong) { /* the other thread would wait for ever */
        (void)fprintf(stderr, "consumer: %s: %s\n", wrong, error_text());
        _exit(1);
    }
    return NULL;
}

static void a_million_descriptors_pass_between_two_threads(void **state)
{
    (void)state;
    struct bench b = bench_open();
    pthread_t threads[2];
    void *wrong = NULL;
    assert_int_equal(pthread_create(&threads[0], NULL, produce_all, &b), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, borrow_all, &b), 0);
    assert_int_equal(pthread_join(threads[0], &wrong), 0);
    if (wrong)
        fail_msg("%s", (char *)wrong);
    assert_int_equal(pthread_join(threads[1], &wrong), 0);
    assert_int_equal(ring_waiting(&b.lend), 0);
    bench_close(&b);
}

/* -- death and damage -- */

static void a_half_written_descriptor_is_not_seen(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    publish_n(&b.lend, 0, 2);
    memset(&b.lend.producer->descriptors[2], 0x5a, 40); /* died before the cursor moved */
    consume_n(&b.lend, 0, 2);
    assert_int_equal(ring_consume(&b.lend, &d), 0);
    publish_n(&b.lend, 2, 1); /* its successor overwrites it */
    consume_n(&b.lend, 2, 1);
    bench_close(&b);
}

static _Noreturn void publish_for_ever(struct bench *b)
{
    for (uint64_t count = 0;;) {
        struct ring_descriptor d = {.page = count, .step = 9};
        if (ring_publish(&b->lend, &d) == 0)
            count++;
        else
            (void)sched_yield();
    }
}

static void a_producer_killed_at_any_moment_leaves_a_consistent_ring(void **state)
{
    (void)state;
    uint64_t seed = (uint64_t)time(NULL);
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 30; round++) {
        struct bench b = bench_open();
        struct ring_descriptor d;
        uint64_t next = 0, stop = 1 + fixture_random(&seed) % 2000;
        pid_t pid = fork();
        if (pid == 0)
            publish_for_ever(&b);
        int rc = 0;
        while (next < stop && (rc = ring_consume(&b.lend, &d)) >= 0)
            if (rc == 1)
                assert_int_equal(d.page, next++);
            else
                (void)sched_yield();
        (void)kill(pid, SIGKILL);
        assert_int_equal(fixture_wait(pid), 1000 + SIGKILL);
        assert_true(ring_waiting(&b.lend) <= DEPTH);
        while ((rc = ring_consume(&b.lend, &d)) == 1)
            assert_int_equal(d.page, next++);
        assert_int_equal(rc, 0);
        publish_n(&b.lend, next, DEPTH); /* a successor goes on from the cursor that it finds */
        consume_n(&b.lend, next, DEPTH);
        bench_close(&b);
    }
}

static void every_flipped_bit_of_a_descriptor_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    publish_n(&b.lend, 5, 1);
    unsigned char *bytes = (unsigned char *)&b.lend.producer->descriptors[0];
    for (int bit = 0; bit < RING_LINE_BYTES * 8; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        assert_int_equal(ring_consume(&b.lend, &d), -ERROR_DAMAGED);
        fixture_expect_text("descriptor 0 damaged");
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    assert_int_equal(ring_waiting(&b.lend), 1); /* a refusal does not consume */
    consume_n(&b.lend, 5, 1);
    bench_close(&b);
}

static void another_generations_descriptor_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    struct ring old = b.lend;
    old.generation = GENERATION - 1;
    publish_n(&old, 0, 1);
    assert_int_equal(ring_consume(&b.lend, &d), -ERROR_DAMAGED);
    fixture_expect_text("of generation 2, expected 3");
    bench_close(&b);
}

static void a_producer_cursor_too_far_ahead_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    publish_n(&b.lend, 0, 3);
    atomic_store(&b.lend.producer->head, DEPTH + 1);
    assert_int_equal(ring_consume(&b.lend, &d), -ERROR_DAMAGED);
    fixture_expect_text("head 17, tail 0, depth 16");
    bench_close(&b);
}

static void a_producer_cursor_behind_the_consumer_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    publish_n(&b.lend, 0, 3);
    consume_n(&b.lend, 0, 3);
    atomic_store(&b.lend.producer->head, 2);
    assert_int_equal(ring_consume(&b.lend, &d), -ERROR_DAMAGED);
    fixture_expect_text("ring damaged: head 2, tail 3");
    bench_close(&b);
}

static void a_descriptor_of_an_earlier_lap_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    publish_n(&b.lend, 0, DEPTH);
    consume_n(&b.lend, 0, DEPTH);
    atomic_store(&b.lend.producer->head, DEPTH + 1); /* within bounds, but nothing was published */
    assert_int_equal(ring_consume(&b.lend, &d), -ERROR_DAMAGED);
    fixture_expect_text("descriptor 16 damaged");
    bench_close(&b);
}

static void a_descriptor_that_was_never_written_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d;
    atomic_store(&b.lend.producer->head, 1);
    assert_int_equal(ring_consume(&b.lend, &d), -ERROR_DAMAGED);
    fixture_expect_text("descriptor 0 damaged");
    bench_close(&b);
}

static void a_consumer_cursor_ahead_of_the_producer_is_refused(void **state)
{
    (void)state;
    struct bench b = bench_open();
    struct ring_descriptor d = {0};
    publish_n(&b.lend, 0, 3);
    atomic_store(&b.lend.consumer->tail, 4);
    assert_int_equal(ring_publish(&b.lend, &d), -ERROR_DAMAGED);
    fixture_expect_text("ring damaged: head 3, tail 4");
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_ring_gives_nothing),
        cmocka_unit_test(a_full_ring_refuses_until_one_is_consumed),
        cmocka_unit_test(order_survives_every_fill_level_across_the_wrap),
        cmocka_unit_test(cursors_run_over_the_end_of_64_bits),
        cmocka_unit_test(the_producer_region_holds_cursor_and_descriptors),
        cmocka_unit_test(a_half_written_descriptor_is_not_seen),
        cmocka_unit_test(every_flipped_bit_of_a_descriptor_is_refused),
        cmocka_unit_test(another_generations_descriptor_is_refused),
        cmocka_unit_test(a_producer_cursor_too_far_ahead_is_refused),
        cmocka_unit_test(a_producer_cursor_behind_the_consumer_is_refused),
        cmocka_unit_test(a_descriptor_of_an_earlier_lap_is_refused),
        cmocka_unit_test(a_descriptor_that_was_never_written_is_refused),
        cmocka_unit_test(a_consumer_cursor_ahead_of_the_producer_is_refused),
        cmocka_unit_test(a_million_descriptors_pass_between_two_processes),
        cmocka_unit_test(a_producer_killed_at_any_moment_leaves_a_consistent_ring),
        cmocka_unit_test(a_million_descriptors_pass_between_two_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
