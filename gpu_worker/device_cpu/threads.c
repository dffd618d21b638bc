#include "gpu_worker/device_cpu/threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>

#include "procs/check.h"
#include "procs/error.h"

enum {
    THREADS_MAX = 1024,
    SPINS_BEFORE_SLEEP = 4000, /* a pause is 40 to 140 cycles: about 0.1 ms */
    CACHE_LINE = 64,
    MXCSR_FLUSH = 0x8040, /* FTZ | DAZ */
};

struct threads {
    _Alignas(CACHE_LINE) _Atomic uint32_t epoch;   /* written by the caller; futex of the workers */
    _Atomic uint32_t sleepers;                     /* workers that sleep, or are about to */
    _Alignas(CACHE_LINE) _Atomic uint64_t next;    /* the next item to claim */
    _Alignas(CACHE_LINE) _Atomic uint32_t running; /* workers not yet done; futex of the caller */
    _Atomic uint32_t caller_sleeps;
    _Alignas(CACHE_LINE) threads_work work; /* the loop: written by the caller before epoch */
    void *context;
    uint64_t items;
    uint32_t count;
    uint32_t started; /* workers that were created */
    _Atomic uint32_t stop;
    _Atomic uint64_t *heartbeat; /* of the caller; NULL: nobody watches */
    pthread_t *handles;
};

struct start {
    struct threads *threads;
    uint32_t index;
};

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
    /* EAGAIN and EINTR are answered by the caller's loop, which looks at the word again */
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void flush_denormals(void)
{
    _mm_setcsr(_mm_getcsr() | MXCSR_FLUSH);
}

static void beat(struct threads *threads)
{
    if (threads->heartbeat)
        atomic_fetch_add_explicit(threads->heartbeat, 1, memory_order_relaxed);
}

static void claim_items(struct threads *threads, uint32_t index)
{
    for (;;) {
        uint64_t item = atomic_fetch_add_explicit(&threads->next, 1, memory_order_relaxed);
        if (item >= threads->items)
            return;
        threads->work(threads->context, item, index);
        if (index == 0)
            beat(threads);
    }
}

/* Returns the epoch that follows `seen`. */
static uint32_t await_epoch(struct threads *threads, uint32_t seen)
{
    uint32_t now;
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP; spin++) {
        now = atomic_load_explicit(&threads->epoch, memory_order_acquire);
        if (now != seen)
            return now;
        _mm_pause();
    }
    /* sequentially consistent: either the caller sees the sleeper, or the sleeper the new epoch */
    atomic_fetch_add(&threads->sleepers, 1);
    while ((now = atomic_load(&threads->epoch)) == seen)
        sleep_while(&threads->epoch, seen);
    atomic_fetch_sub(&threads->sleepers, 1);
    return now;
}

static void *worker_main(void *argument)
{
    struct start start = *(struct start *)argument;
    struct threads *threads = start.threads;
    free(argument);
    flush_denormals();
    uint32_t epoch = 0;
    for (;;) {
        epoch = await_epoch(threads, epoch);
        if (atomic_load_explicit(&threads->stop, memory_order_relaxed))
            return NULL;
        claim_items(threads, start.index);
        if (atomic_fetch_sub(&threads->running, 1) == 1 && atomic_load(&threads->caller_sleeps))
            wake_all(&threads->running);
    }
}

static void await_workers(struct threads *threads)
{
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP; spin++) {
        if (atomic_load_explicit(&threads->running, memory_order_acquire) == 0)
            return;
        _mm_pause();
    }
    atomic_store(&threads->caller_sleeps, 1);
    uint32_t left;
    while ((left = atomic_load(&threads->running)) != 0)
        sleep_while(&threads->running, left);
    atomic_store(&threads->caller_sleeps, 0);
}

static void begin_epoch(struct threads *threads)
{
    atomic_fetch_add(&threads->epoch, 1);
    if (atomic_load(&threads->sleepers) != 0)
        wake_all(&threads->epoch);
}

void threads_set_heartbeat(struct threads *threads, _Atomic uint64_t *heartbeat)
{
    threads->heartbeat = heartbeat;
}

void threads_run(struct threads *threads, uint64_t items, threads_work work, void *context)
{
    if (threads->count == 1 || items <= 1) {
        for (uint64_t item = 0; item < items; item++) {
            work(context, item, 0);
            beat(threads);
        }
        return;
    }
    threads->work = work;
    threads->context = context;
    threads->items = items;
    atomic_store_explicit(&threads->next, 0, memory_order_relaxed);
    atomic_store_explicit(&threads->running, threads->count - 1, memory_order_relaxed);
    begin_epoch(threads);
    claim_items(threads, 0);
    await_workers(threads);
}

static int start_worker(struct threads *threads, uint32_t index)
{
    struct start *start = malloc(sizeof *start);
    if (start == NULL)
        return error_set(ERROR_FAILED, "out of memory while starting a compute thread");
    *start = (struct start){threads, index};
    int failure = pthread_create(&threads->handles[index - 1], NULL, worker_main, start);
    if (failure != 0) {
        free(start);
        return error_set(ERROR_FAILED, "cannot start compute thread %u of %u: %s", index + 1,
                         threads->count, strerror(failure));
    }
    threads->started++;
    return 0;
}

int threads_open(struct threads **out, uint32_t count)
{
    CHECK(count >= 1 && count <= THREADS_MAX);
    struct threads *threads = aligned_alloc(CACHE_LINE, sizeof *threads);
    pthread_t *handles = calloc(count, sizeof *handles);
    if (threads == NULL || handles == NULL) {
        free(threads);
        free(handles);
        return error_set(ERROR_FAILED, "out of memory for %u compute threads", count);
    }
    memset(threads, 0, sizeof *threads);
    threads->count = count;
    threads->handles = handles;
    /* signals belong to the main loop's thread: workers are born with all of them blocked */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    for (uint32_t i = 1; i < count && rc == 0; i++)
        rc = start_worker(threads, i);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc < 0) {
        threads_close(threads);
        return rc;
    }
    flush_denormals();
    *out = threads;
    return 0;
}

void threads_close(struct threads *threads)
{
    if (threads == NULL)
        return;
    atomic_store(&threads->stop, 1);
    begin_epoch(threads);
    for (uint32_t i = 0; i < threads->started; i++)
        pthread_join(threads->handles[i], NULL);
    free(threads->handles);
    free(threads);
}

uint32_t threads_count(const struct threads *threads)
{
    return threads->count;
}
