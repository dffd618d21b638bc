/*
 * What an engine implementation provides, and how tests put a lying one underneath (engine.h).
 *
 * A backend moves single transfers of at most 0x7ffff000 bytes and reports each result as the
 * kernel gave it: bytes moved, or -errno. It interprets nothing.
 */
#ifndef IO_WORKER_ENGINE_BACKEND_H
#define IO_WORKER_ENGINE_BACKEND_H

#include "io_worker/engine.h"

struct engine_transfer {
    enum io_op op;
    unsigned file;
    void *buffer;
    uint64_t offset;
    uint32_t bytes;
    struct io_request *tag; /* comes back with the result */
};

struct engine_backend {
    const char *name;
    /* Starts one transfer. At most `depth` are outstanding, so there is always room. */
    void (*start)(void *self, const struct engine_transfer *transfer);
    /* Next finished transfer: 1 with its tag and result, or 0 if none has finished. */
    int (*collect)(void *self, struct io_request **tag, int64_t *result);
    int (*event_fd)(const void *self);
    /* Called with nothing outstanding. */
    void (*close)(void *self);
};

/* Each creates `self` for `options`; `notice` gets a sentence, or "". 0, or ERROR_FAILED. */
int engine_uring_create(const struct engine_options *options, void **self, char *notice,
                        uint64_t notice_bytes);
int engine_sync_create(const struct engine_options *options, void **self);
extern const struct engine_backend engine_uring_backend;
extern const struct engine_backend engine_sync_backend;

/* An engine over any backend; takes over `self` also when it fails. */
int engine_open_backend(struct engine **engine, const struct engine_options *options,
                        const struct engine_backend *backend, void *self);

#endif
