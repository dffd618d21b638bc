/*
 * The control channel, and the rings under watch.
 *
 * A message arrives at once, late, twice, or never; late ones in any order, also after the session
 * they belong to.
 *
 * Conservation of frames: of every pool, each frame is with its allocator, in a ring or with the
 * borrower, and moves only along topology.h's circle. WEIGHTS lends a frame several times, so there
 * the times are counted.
 */
#include "tests/sim/sim.h"

#include "io_worker/io.h"
#include "ipc/worker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENDPOINTS_MAX = 48, LATE_MAX = 64 };

static struct endpoint endpoints[ENDPOINTS_MAX];

static struct late {
    char address[PLAN_ENDPOINT_BYTES + 8], to[MESSAGE_PEER_BYTES];
    struct sim_message m;
} late[LATE_MAX];
static unsigned n_late;

void sim_ipc_reset(void)
{
    for (int i = 0; i < ENDPOINTS_MAX; i++)
        endpoints[i].in_use = 0;
    n_late = 0;
}

void sim_ipc_gone(int process)
{
    for (int i = 0; i < ENDPOINTS_MAX; i++)
        if (endpoints[i].in_use && endpoints[i].process == process)
            endpoints[i].in_use = 0;
}

/* -- endpoint.h -- */

static int open_endpoint(struct endpoint **out, const char *address, const char *name)
{
    for (int i = 0; i < ENDPOINTS_MAX; i++) {
        struct endpoint *e = &endpoints[i];
        if (e->in_use)
            continue;
        e->in_use = 1;
        e->process = sim.current;
        e->is_router = !name;
        e->n_inbox = 0;
        e->dropped = 0;
        (void)snprintf(e->name, sizeof e->name, "%s", name ? name : "");
        (void)snprintf(e->address, sizeof e->address, "%s", address);
        *out = e;
        return 0;
    }
    return error_set(ERROR_FAILED, "sim: too many endpoints");
}

int endpoint_bind(struct endpoint **e, const char *address)
{
    return open_endpoint(e, address, NULL);
}

int endpoint_connect(struct endpoint **e, const char *address, const char *name)
{
    return open_endpoint(e, address, name);
}

void endpoint_close(struct endpoint *e)
{
    if (e)
        e->in_use = 0;
}

uint64_t endpoint_dropped(const struct endpoint *e)
{
    return e->dropped;
}

/* `to` "": the router of that address. */
static struct endpoint *find_endpoint(const char *address, const char *to)
{
    for (int i = 0; i < ENDPOINTS_MAX; i++) {
        struct endpoint *e = &endpoints[i];
        if (e->in_use && e->is_router == !*to && strcmp(e->address, address) == 0 &&
            (!*to || strcmp(e->name, to) == 0))
            return e;
    }
    return NULL;
}

static int put(const char *address, const char *to, const struct sim_message *m)
{
    struct endpoint *e = find_endpoint(address, to);
    if (!e || e->n_inbox == SIM_INBOX_MAX)
        return -EAGAIN;
    e->inbox[e->n_inbox++] = *m;
    return 0;
}

static void delay(const char *address, const char *to, const struct sim_message *m)
{
    if (n_late == LATE_MAX)
        return;
    struct late *l = &late[n_late++];
    (void)snprintf(l->address, sizeof l->address, "%s", address);
    (void)snprintf(l->to, sizeof l->to, "%s", to);
    l->m = *m;
}

int endpoint_send(struct endpoint *e, const char *to, const struct message *m)
{
    struct sim_message sent;
    const char *peer = to ? to : "";
    sent.m = *m;
    memcpy(sent.from, e->name, sizeof sent.from);
    if (m->type == MESSAGE_STOPPING)
        sim_on_stopping(m->step);
    sim_yield();
    uint64_t fate = sim_below(32);
    if (fate == 0)
        return 0; /* lost */
    if (fate < 4)
        delay(e->address, peer, &sent);
    if (fate == 3 || fate >= 4)
        return put(e->address, peer, &sent);
    return 0;
}

void sim_ipc_post(const char *from, const struct message *m)
{
    char address[PLAN_ENDPOINT_BYTES + 8];
    struct sim_message sent = {.m = *m};
    (void)snprintf(address, sizeof address, "ipc://%s", sim_newest_plan()->endpoint);
    (void)snprintf(sent.from, sizeof sent.from, "%s", from);
    (void)put(address, "", &sent);
}

unsigned sim_ipc_on_their_way(void)
{
    return n_late;
}

int sim_ipc_deliver(void)
{
    if (!n_late)
        return 0;
    struct late *l = &late[sim_below(n_late)];
    (void)put(l->address, l->to, &l->m);
    *l = late[--n_late];
    return 1;
}

int endpoint_receive(struct endpoint *e, char *from, struct message *m)
{
    if (e->n_inbox == 0)
        return 0;
    *m = e->inbox[0].m;
    if (from)
        memcpy(from, e->inbox[0].from, MESSAGE_PEER_BYTES);
    memmove(e->inbox, e->inbox + 1, --e->n_inbox * sizeof e->inbox[0]);
    return 1;
}

int endpoint_sleep(struct endpoint *e, const int *fds, int *ready, int n, int timeout_ms)
{
    struct sim_process *p = sim_self();
    int some = e->n_inbox > 0;
    for (int i = 0; i < n; i++)
        some |= sim_fd_readable(p, fds[i]);
    if (!some) {
        for (int i = 0; i < n; i++)
            sim_sleep_for(fds[i]);
        p->sleeps_for_message = e;
        p->wake_ns = sim.now_ns + (uint64_t)timeout_ms * 1000000u;
        sim_sleep();
    } else {
        sim_yield();
    }
    for (int i = 0; i < n; i++)
        ready[i] = sim_fd_readable(p, fds[i]);
    return 0;
}

/* -- worker.h: where a worker checks and waits, and what it tells -- */

int real_worker_check(struct worker *w);
int real_worker_pause(struct worker *w, int why);
void real_worker_ready(struct worker *w);
void real_worker_fact(struct worker *w);

int worker_check(struct worker *w)
{
    sim_yield();
    return real_worker_check(w);
}

int worker_pause(struct worker *w, int why)
{
    sim_yield();
    return real_worker_pause(w, why);
}

void worker_ready(struct worker *w)
{
    if (w->self->role == ROLE_IO)
        sim_on_resume(w->self, w->segment.generation > w->plan->generation);
    real_worker_ready(w);
}

void worker_fact(struct worker *w)
{
    if (w->self->role == ROLE_IO)
        sim_on_commit(w->self);
    sim_yield();
    real_worker_fact(w);
}

int sim_at_fault_point(int fault);
int sim_at_fault_point(int fault)
{
    (void)fault;
    sim_yield();
    return 0;
}

/* -- frames: each in exactly one place -- */

enum place { WITH_ALLOCATOR, LENT, BORROWED, COMING_BACK };
static const char *const place_names[] = {"with its allocator", "in a lending ring", "borrowed",
                                          "in a RETURN ring"};

enum { FRAMES_MAX = 16, TRACKED_MAX = 32 };

static struct frames {
    uint32_t generation;
    uint8_t place[REGION_COUNT][OPT_WORKERS_MAX][FRAMES_MAX];
    uint8_t out_of[OPT_WORKERS_MAX][FRAMES_MAX]; /* the OUT frame lent with a STATE frame */
    int32_t weights_lent;
} all_frames[TRACKED_MAX];

void sim_frames_reset(void)
{
    memset(all_frames, 0, sizeof all_frames);
}

void sim_frames_forget(int segment)
{
    memset(&all_frames[segment], 0, sizeof all_frames[segment]);
}

/* Which ring this is, by where it lies. */
static int find_ring(const struct ring *ring, struct frames **frames, uint32_t *instance)
{
    const unsigned char *memory;
    const unsigned char *at = (const unsigned char *)ring->producer;
    int object = sim_segment_of(at, &memory);
    if (object < 0 || object >= TRACKED_MAX)
        return -1;
    const struct plan *plan = (const void *)memory;
    uint64_t offset = (uint64_t)(at - memory);
    for (int r = 0; r < RING_COUNT; r++) {
        const struct plan_region *place = &plan->ring_producers[r];
        if (offset < place->offset || offset >= place->offset + place->stride * place->instances)
            continue;
        *instance = (uint32_t)((offset - place->offset) / place->stride);
        *frames = &all_frames[object];
        if ((*frames)->generation != ring->generation) /* a new life of the rings: all is back */
            memset(*frames, 0, sizeof **frames);
        (*frames)->generation = ring->generation;
        return r;
    }
    return -1;
}

static void move(uint8_t *place, enum place from, enum place to, const char *ring, uint32_t frame)
{
    if (*place != from)
        sim_violation("frame %u of ring %s is %s, expected %s", frame, ring, place_names[*place],
                      place_names[from]);
    *place = (uint8_t)to;
}

static int is_return(int ring)
{
    return ring == RING_MICROBATCH_RETURN || ring == RING_GRADIENT_RETURN ||
           ring == RING_STATE_RETURN || ring == RING_WRITEBACK;
}

static void count_weights(struct frames *f, int change)
{
    f->weights_lent += change;
    if (f->weights_lent < 0)
        sim_violation("more WEIGHTS frames came back than were lent");
}

/* A STATE descriptor lends two frames; a bad image comes back without its OUT frame. */
static void track_out(struct frames *f, uint32_t i, const struct ring_descriptor *d, int consumed,
                      int ring)
{
    uint8_t *out = f->place[REGION_OUT_POOL][i];
    if (ring == RING_STATE && d->out_frame < FRAMES_MAX) {
        move(&out[d->out_frame], consumed ? LENT : WITH_ALLOCATOR, consumed ? BORROWED : LENT,
             "STATE (OUT frame)", d->out_frame);
        f->out_of[i][d->frame] = (uint8_t)d->out_frame;
    } else if (ring == RING_STATE_RETURN && d->kind == STATE_RETURN_BAD && consumed) {
        out[f->out_of[i][d->frame]] = WITH_ALLOCATOR; /* kept for the same image, read again */
    }
}

static void track(const struct ring *ring, const struct ring_descriptor *d, int consumed)
{
    struct frames *f;
    uint32_t i = 0;
    int r = find_ring(ring, &f, &i);
    if (r < 0 || d->frame >= FRAMES_MAX)
        return;
    if (r == RING_WEIGHTS || r == RING_WEIGHTS_RETURN) {
        if (r == RING_WEIGHTS && !consumed)
            count_weights(f, 1);
        if (r == RING_WEIGHTS_RETURN && consumed)
            count_weights(f, -1);
        return;
    }
    enum region_id pool = topology_rings[r].pool;
    uint32_t instance = topology_regions[pool].per_worker ? i : 0;
    enum place from = is_return(r) ? BORROWED : WITH_ALLOCATOR;
    enum place between = is_return(r) ? COMING_BACK : LENT;
    enum place to = is_return(r) ? WITH_ALLOCATOR : BORROWED;
    move(&f->place[pool][instance][d->frame], consumed ? between : from, consumed ? to : between,
         topology_rings[r].name, d->frame);
    track_out(f, i, d, consumed, r);
}

/* -- rings -- */

int real_ring_publish(struct ring *ring, const struct ring_descriptor *d);
int real_ring_consume(struct ring *ring, struct ring_descriptor *d);

int ring_publish(struct ring *ring, const struct ring_descriptor *d)
{
    sim_yield();
    int rc = real_ring_publish(ring, d);
    if (rc == 0)
        track(ring, d, 0);
    sim_yield();
    return rc;
}

int ring_consume(struct ring *ring, struct ring_descriptor *d)
{
    sim_yield();
    int rc = real_ring_consume(ring, d);
    if (rc == 1) {
        track(ring, d, 1);
        sim_yield();
    }
    return rc;
}
