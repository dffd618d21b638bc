/*
 * The messages, each listed once with who may send it to whom.
 *
 * A message is a msgpack array [type, token, generation, step, a, text]. It commands nothing that
 * the control pages do not say too, with two exceptions that concern no step: HELLO introduces a
 * worker, STOP comes from another process (`mtlaunch stop`). A receiver drops, and counts, what has
 * the wrong token, generation or sender.
 */
#ifndef IPC_MESSAGE_H
#define IPC_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/plan.h"

/* who: 'w' a worker, 'l' the launcher, 'c' a command (mtlaunch stop) */
#define MESSAGE_LIST(X)                                                                            \
    X(HELLO, "wl", "a = pid: a worker is attached; first message of its life")                     \
    X(READY, "wl", "set up, waiting for orders; any time after HELLO, once")                       \
    X(FACT, "wl", "my control page changed; any time after READY")                                 \
    X(FAILED, "wl", "text = error, a = kind; the last message of a worker that leaves in order")   \
    X(DOORBELL, "wl",                                                                              \
      "text = worker whose ring advanced while it slept; the launcher passes it on")               \
    X(WAKE, "lw", "look at your rings and at the launcher's page; any time")                       \
    X(STOP, "cl", "finish the step, commit it, stop; any time")                                    \
    X(STOPPING, "lc", "step = the step after which the run will stop; answers STOP")

enum message_type {
#define X(name, who, text) MESSAGE_##name,
    MESSAGE_LIST(X)
#undef X
        MESSAGE_COUNT
};

enum { MESSAGE_TEXT_BYTES = 4096, MESSAGE_BYTES_MAX = 8192, MESSAGE_PEER_BYTES = 64 };

struct message {
    enum message_type type;
    uint32_t generation;
    uint64_t step, a;
    char token[PLAN_TOKEN_BYTES];
    char text[MESSAGE_TEXT_BYTES];
};

const char *message_name(enum message_type type);

/* Bytes written into `out`, or negative (error_set) when it does not fit. */
int64_t message_encode(const struct message *m, unsigned char *out, size_t capacity);

/* 0, or negative (error_set): garbage, unknown type, a text too long. Bounded work for any input.
 */
int message_decode(const unsigned char *bytes, size_t n, struct message *m);

/* 1 if a sender of this kind ('w', 'l', 'c') may send this type to that kind of receiver. */
int message_allowed(enum message_type type, char sender, char receiver);

#endif
