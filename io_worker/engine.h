/*
 * Asynchronous file I/O with one face and two implementations.
 *
 * engine_uring.c   io_uring: registered files, registered buffers where memlock allows, an eventfd.
 * engine_sync.c    pread, pwrite, fdatasync at submission: reference, fallback and debugging mode.
 *
 * A backend moves one transfer and says what the kernel said. Everything that makes a transfer
 * trustworthy is above it, once, in engine.c, and so is the same for both and is tested with a
 * backend that lies (tests/io): every result is examined; EINTR and EAGAIN are retried, a bounded
 * number of times without progress; a short transfer is continued from the last aligned byte; a
 * request larger than one system call moves (0x7ffff000 bytes) is split; a read of nothing is "file
 * ended", never success. Errors of FLUSH are never retried: the kernel may have dropped the pages
 * and would report success next time.
 *
 * The calling loop:
 *
 *     if (engine_submit(engine, &request) == ENGINE_FULL)
 *         ... come back after engine_poll() has handled something ...
 *     zmq_poll(..., engine_event_fd(engine), ...);
 *     engine_poll(engine);      // calls request->on_done for each that finished
 *
 * Requests belong to the caller and stay in place until on_done; the engine allocates nothing after
 * engine_open. on_done may submit, also the same request again. Not thread-safe: one engine, one
 * thread.
 */
#ifndef IO_WORKER_ENGINE_H
#define IO_WORKER_ENGINE_H

#include <stdint.h>

enum engine_kind { ENGINE_AUTO, ENGINE_URING, ENGINE_SYNC };

enum io_op { IO_READ, IO_WRITE, IO_FLUSH };

enum engine_answer { ENGINE_ACCEPTED = 0, ENGINE_FULL = 1 };

enum {
    ENGINE_DEPTH_MAX = 1024,
    ENGINE_FILES_MAX = 64,
    ENGINE_REGIONS_MAX = 256,
    ENGINE_IDLE_RETRIES_MAX = 100, /* EINTR, EAGAIN or no aligned progress, in a row */
};

struct io_request {
    /* set by the caller */
    enum io_op op;
    unsigned file; /* index into engine_options.files */
    void *buffer;  /* READ, WRITE; as aligned as the file demands */
    uint64_t offset;
    uint64_t bytes;
    void (*on_done)(struct io_request *request,
                    int result); /* 0, or -errno; -ENODATA: file ended */
    void *context;
    /* kept by the engine */
    uint64_t done_bytes;
    uint64_t submitted_ns; /* CLOCK_MONOTONIC; the watchdog names the oldest */
    uint32_t idle_retries;
    int result;
    struct io_request *next, *previous; /* in flight, oldest first */
};

struct engine_file {
    int fd;
    const char *path;   /* for messages; outlives the engine */
    uint64_t alignment; /* a continued transfer restarts at a multiple of it; 1: buffered */
};

/* Memory that requests will mostly use; registered where possible. Only a speed matter. */
struct engine_region {
    void *base;
    uint64_t bytes;
};

struct engine_options {
    enum engine_kind kind;
    unsigned depth; /* requests in flight, 1 .. ENGINE_DEPTH_MAX */
    const struct engine_file *files;
    unsigned n_files;
    const struct engine_region *regions;
    unsigned n_regions;
    uint64_t transfer_bytes_max; /* 0: what one system call moves; tests set it small */
};

struct engine;

/* Opens an engine over open files, which stay the caller's to close, after the engine. ENGINE_AUTO
 * is io_uring, or the sync engine where io_uring cannot be set up; ENGINE_URING fails there
 * (ERROR_FAILED). engine_notice() then says what the user should know. */
int engine_open(struct engine **engine, const struct engine_options *options);

/* Waits until nothing is in flight (calling on_done), then frees. NULL is fine. */
void engine_close(struct engine *engine);

/* ENGINE_ACCEPTED, or ENGINE_FULL when `depth` requests are in flight: nothing was done, come back.
 */
enum engine_answer engine_submit(struct engine *engine, struct io_request *request);

/* Handles what has finished; the number of requests whose on_done was called. Never blocks (the
 * sync engine has done its blocking in submit). */
unsigned engine_poll(struct engine *engine);

/* engine_poll(), but sleeps up to `timeout_ms` for the first completion. For start-up and commands;
 * a worker's main loop sleeps elsewhere. */
unsigned engine_wait(struct engine *engine, int timeout_ms);

/* Submits one request and waits for it alone to finish (others finish on the way). 0, or
 * ERROR_FAILED as engine_request_error() says it. For start-up and commands. `request.on_done` and
 * `.context` are overwritten. */
int engine_run(struct engine *engine, struct io_request *request);

/* Called before and after each sleep of engine_wait(): nobody else tells what is waited for there.
 */
void engine_on_wait(struct engine *engine, void (*on_wait)(void *context), void *context);

unsigned engine_in_flight(const struct engine *engine);

/* Readable when engine_poll() has something to do. */
int engine_event_fd(const struct engine *engine);

/* The request in flight for longest, or NULL. */
const struct io_request *engine_oldest(const struct engine *engine);

/* Sets ERROR_FAILED for a finished request with result < 0: path, operation, bytes, offset, errno.
 */
int engine_request_error(const struct engine *engine, const struct io_request *request);

/* "write of 4096 bytes at offset 8192 of /store/slots": for watchdog and messages. */
void engine_request_describe(const struct engine *engine, const struct io_request *request,
                             char *text, uint64_t text_bytes);

/* What runs: "io_uring" or "sync"; and a plain sentence worth showing, "" if there is none. */
const char *engine_name(const struct engine *engine);
const char *engine_notice(const struct engine *engine);

/* "auto", "io_uring", "sync". engine_kind_parse: 0, or ERROR_USER naming the values there are. */
const char *engine_kind_name(enum engine_kind kind);
int engine_kind_parse(const char *name, enum engine_kind *kind);

#endif
