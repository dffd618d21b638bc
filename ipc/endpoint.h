/*
 * One end of the control channel: a ROUTER in the launcher, a DEALER in each worker and command.
 *
 * Sends never block (a full or absent peer drops the message: the truth is in the control pages)
 * and nothing lingers at exit.
 */
#ifndef IPC_ENDPOINT_H
#define IPC_ENDPOINT_H

#include <stdint.h>

#include "ipc/message.h"

struct endpoint;

/* The launcher's end. `address`: "ipc://" and a path of fewer than PLAN_ENDPOINT_BYTES bytes. The
 * socket has mode 0600, and peers of other users than this one and root are turned away. */
int endpoint_bind(struct endpoint **endpoint, const char *address);

/* A worker's or command's end, known to the launcher as `name`. */
int endpoint_connect(struct endpoint **endpoint, const char *address, const char *name);
void endpoint_close(struct endpoint *endpoint);

/* `to`: the peer's name; NULL from a worker. 0, or -EAGAIN when the message was dropped (and
 * counted): no such peer, or its queue is full. */
int endpoint_send(struct endpoint *endpoint, const char *to, const struct message *m);

/* 1 received (`from`, MESSAGE_PEER_BYTES, is filled in at the launcher's end), 0 none there.
 * Garbage is dropped and counted. */
int endpoint_receive(struct endpoint *endpoint, char *from, struct message *m);

/* Sleeps until a message or one of `fds` (at most 80) is readable, or the time is over; ready[i]
 * tells for each descriptor. 0, or negative errno other than EINTR. */
int endpoint_sleep(struct endpoint *endpoint, const int *fds, int *ready, int n, int timeout_ms);

uint64_t endpoint_dropped(const struct endpoint *endpoint);

#endif
