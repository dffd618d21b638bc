/*
 * The compute threads of a device: created once, fed one parallel loop at a time.
 *
 * A loop has `items` independent work items; threads claim them one by one, so that which thread
 * does which item, and in what order, is left to chance. Whoever wants the same bits for every
 * thread count therefore fixes the items and lets no item read what another writes.
 *
 * Who writes what. The caller fills `work`, `context`, `items`, resets `next` and `running`, then
 * publishes with a release increment of `epoch`; workers acquire `epoch`, so they see the loop.
 * Each worker releases its last decrement of `running`; the caller acquires it, so it sees the
 * results. Both sides spin for a while (a loop lasts about a millisecond, a futex wake-up costs 50
 * us), then sleep on the word that they watch.
 */
#ifndef GPU_WORKER_DEVICE_CPU_THREADS_H
#define GPU_WORKER_DEVICE_CPU_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

struct threads;

/* `thread` is in [0, threads_count()); 0 is the caller. */
typedef void (*threads_work)(void *context, uint64_t item, uint32_t thread);

/* Starts count - 1 threads; the caller is the last one. Denormals are flushed to zero (MXCSR FTZ
 * and DAZ) in each of them and, from here on, in the calling thread. */
int threads_open(struct threads **threads, uint32_t count);
void threads_close(struct threads *threads);
uint32_t threads_count(const struct threads *threads);

/* Counts up with each item that the calling thread does: one operation on a large model may last
 * longer than a watchdog waits for a main loop to turn. */
void threads_set_heartbeat(struct threads *threads, _Atomic uint64_t *heartbeat);

/* Runs work(context, item, thread) once for each item; returns when all are done. */
void threads_run(struct threads *threads, uint64_t items, threads_work work, void *context);

#endif
