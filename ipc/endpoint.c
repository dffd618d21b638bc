#include "ipc/endpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include "procs/check.h"
#include "procs/error.h"

enum { ENDPOINT_FDS_MAX = 80, ENDPOINT_QUEUE_MESSAGES = 4096 };

struct endpoint {
    void *context, *socket;
    int is_router;
    uint64_t dropped;
};

static int fail(struct endpoint *e, const char *what, const char *address)
{
    int rc =
        error_set(ERROR_FAILED, "control channel %s: %s: %s", address, what, zmq_strerror(errno));
    endpoint_close(e);
    return rc;
}

/* libzmq would say "File name too long" without saying how long it may be. */
static int check_address(const char *address)
{
    const size_t scheme = strlen("ipc://"),
                 path_max = sizeof((struct sockaddr_un *)0)->sun_path - 1;
    if (strncmp(address, "ipc://", scheme) != 0 || strlen(address) <= scheme + path_max)
        return 0;
    (void)error_set(ERROR_FAILED, "control channel %s: a path of %zu bytes, at most %zu expected",
                    address, strlen(address) - scheme, path_max);
    return error_hint("a shorter TMPDIR or XDG_RUNTIME_DIR gives a shorter path");
}

static int set_option(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value);
}

/* The kernel says who is at the other end (SO_PEERCRED); libzmq closes on any other user. The
 * directory, the socket's mode and the token keep others out as well: this is the lock that needs
 * no secret. */
static int admit_users(void *socket)
{
    const uid_t users[] = {geteuid(), 0};
    for (size_t i = 0; i < sizeof users / sizeof *users; i++)
        if (zmq_setsockopt(socket, ZMQ_IPC_FILTER_UID, &users[i], sizeof users[i]) < 0)
            return -1;
    return 0;
}

static struct endpoint *open_socket(int type)
{
    struct endpoint *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->context = zmq_ctx_new();
    e->socket = e->context ? zmq_socket(e->context, type) : NULL;
    e->is_router = type == ZMQ_ROUTER;
    if (!e->socket || set_option(e->socket, ZMQ_LINGER, 0) < 0 ||
        set_option(e->socket, ZMQ_SNDHWM, ENDPOINT_QUEUE_MESSAGES) < 0 ||
        set_option(e->socket, ZMQ_RCVHWM, ENDPOINT_QUEUE_MESSAGES) < 0) {
        endpoint_close(e);
        return NULL;
    }
    int64_t bytes_max = MESSAGE_BYTES_MAX;
    (void)zmq_setsockopt(e->socket, ZMQ_MAXMSGSIZE, &bytes_max,
                         sizeof bytes_max); /* decode checks too */
    return e;
}

int endpoint_bind(struct endpoint **endpoint, const char *address)
{
    *endpoint = NULL;
    if (check_address(address) < 0)
        return -(int)error_kind_now();
    struct endpoint *e = open_socket(ZMQ_ROUTER);
    if (!e)
        return error_set(ERROR_FAILED, "control channel: no ZeroMQ socket: %s",
                         zmq_strerror(errno));
    /* MANDATORY: without it a message to an absent peer is dropped and reported as sent */
    if (set_option(e->socket, ZMQ_ROUTER_HANDOVER, 1) < 0 ||
        set_option(e->socket, ZMQ_ROUTER_MANDATORY, 1) < 0)
        return fail(e, "router options", address);
    if (admit_users(e->socket) < 0)
        return fail(e, "admitting only this user and root", address);
    if (zmq_bind(e->socket, address) < 0)
        return fail(e, "bind", address);
    if (strncmp(address, "ipc://", 6) == 0 && chmod(address + 6, 0600) < 0)
        return fail(e, "chmod", address);
    *endpoint = e;
    return 0;
}

int endpoint_connect(struct endpoint **endpoint, const char *address, const char *name)
{
    *endpoint = NULL;
    if (check_address(address) < 0)
        return -(int)error_kind_now();
    struct endpoint *e = open_socket(ZMQ_DEALER);
    if (!e)
        return error_set(ERROR_FAILED, "control channel: no ZeroMQ socket: %s",
                         zmq_strerror(errno));
    if (zmq_setsockopt(e->socket, ZMQ_ROUTING_ID, name, strlen(name)) < 0)
        return fail(e, "routing id", address);
    if (zmq_connect(e->socket, address) < 0)
        return fail(e, "connect", address);
    *endpoint = e;
    return 0;
}

void endpoint_close(struct endpoint *e)
{
    if (!e)
        return;
    if (e->socket)
        (void)zmq_close(e->socket); /* LINGER 0: returns at once */
    if (e->context)
        while (zmq_ctx_term(e->context) < 0 && errno == EINTR)
            ; /* to be called again after a signal */
    free(e);
}

/* A signal between the frames of a message must not tear it. */
static int send_frame(struct endpoint *e, const void *bytes, size_t n, int more)
{
    int rc;
    do
        rc = zmq_send(e->socket, bytes, n, ZMQ_DONTWAIT | more);
    while (rc < 0 && errno == EINTR);
    return rc;
}

int endpoint_send(struct endpoint *e, const char *to, const struct message *m)
{
    unsigned char bytes[MESSAGE_BYTES_MAX];
    int64_t n = message_encode(m, bytes, sizeof bytes);
    CHECK(n >= 0); /* the struct's texts fit by their sizes */
    if (to && send_frame(e, to, strlen(to), ZMQ_SNDMORE) < 0) {
        e->dropped++;
        return -EAGAIN;
    }
    if (send_frame(e, bytes, (size_t)n, 0) < 0) {
        e->dropped++;
        return -EAGAIN;
    }
    return 0;
}

/* One frame of a message: its size, which may be above `capacity` (the rest is cut), or -1 for
 * none. */
static int receive_frame(struct endpoint *e, void *out, size_t capacity, int *more)
{
    size_t size = sizeof *more;
    int n;
    do
        n = zmq_recv(e->socket, out, capacity, ZMQ_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -1;
    if (zmq_getsockopt(e->socket, ZMQ_RCVMORE, more, &size) < 0)
        *more = 0;
    return n;
}

static void drop_rest(struct endpoint *e, int more)
{
    unsigned char scratch[16];
    while (more && receive_frame(e, scratch, sizeof scratch, &more) >= 0)
        ;
}

int endpoint_receive(struct endpoint *e, char *from, struct message *m)
{
    for (;;) {
        unsigned char bytes[MESSAGE_BYTES_MAX];
        int more = 0;
        if (e->is_router) {
            int n = receive_frame(e, from, MESSAGE_PEER_BYTES - 1, &more);
            if (n < 0)
                return 0;
            from[n < MESSAGE_PEER_BYTES ? n : MESSAGE_PEER_BYTES - 1] = '\0';
            if (!more) {
                e->dropped++;
                continue;
            }
        }
        int n = receive_frame(e, bytes, sizeof bytes, &more);
        if (n < 0)
            return 0;
        int whole = !more;
        drop_rest(e, more);
        if (whole && message_decode(bytes, (size_t)n, m) == 0)
            return 1;
        e->dropped++;
    }
}

int endpoint_sleep(struct endpoint *e, const int *fds, int *ready, int n, int timeout_ms)
{
    zmq_pollitem_t items[ENDPOINT_FDS_MAX + 1] = {{.socket = e->socket, .events = ZMQ_POLLIN}};
    CHECK(n <= ENDPOINT_FDS_MAX);
    for (int i = 0; i < n; i++)
        items[i + 1] = (zmq_pollitem_t){.fd = fds[i], .events = ZMQ_POLLIN};
    int rc = zmq_poll(items, n + 1, timeout_ms);
    for (int i = 0; i < n; i++)
        ready[i] = rc > 0 && (items[i + 1].revents & (ZMQ_POLLIN | ZMQ_POLLERR));
    return rc < 0 && errno != EINTR ? -errno : 0;
}

uint64_t endpoint_dropped(const struct endpoint *e)
{
    return e->dropped;
}
