#include "launcher/session.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "ipc/worker.h"
#include "launcher/coordinator.h"
#include "launcher/metrics.h"
#include "launcher/socket_dir.h"
#include "launcher/watchdog.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"

static int has_gpu(const struct plan *plan)
{
    return plan->mode == PLAN_TRAIN || plan->mode == PLAN_EVALUATE || plan->mode == PLAN_GENERATE;
}

static int bind_channel(struct launcher *l)
{
    struct session *s = &l->session;
    char address[PLAN_ENDPOINT_BYTES + 8];
    if (l->generation == 1)
        socket_dir_sweep();
    (void)snprintf(s->socket_dir, sizeof s->socket_dir, "/tmp/mtlaunch-XXXXXX");
    if (!mkdtemp(s->socket_dir)) {
        s->socket_dir[0] = '\0';
        return error_set(ERROR_FAILED, "/tmp: cannot make a private directory: %s",
                         strerror(errno));
    }
    (void)snprintf(s->plan->endpoint, sizeof s->plan->endpoint, "%s/ctl", s->socket_dir);
    (void)snprintf(address, sizeof address, "ipc://%s", s->plan->endpoint);
    return endpoint_bind(&s->endpoint, address);
}

static void attach_pages(struct session *s)
{
    const struct plan *plan = s->segment.plan;
    s->orders = segment_region(&s->segment, REGION_LAUNCHER_CONTROL, 0);
    s->orders->magic = CONTROL_MAGIC;
    /* relaxed: no worker is started yet */
    atomic_store_explicit(&s->orders->generation, plan->generation, memory_order_relaxed);
    atomic_store_explicit(&s->orders->abort_generation, plan->generation, memory_order_relaxed);
    s->io = segment_region(&s->segment, REGION_IO_CONTROL, 0);
    s->gpu = segment_region(&s->segment, REGION_GPU_CONTROL, 0);
    for (uint32_t i = 0; i < plan->opt_workers; i++)
        s->opt[i] = segment_region(&s->segment, REGION_OPT_CONTROL, i);
}

static int start_child(struct session *s, enum role role, uint32_t index)
{
    CHECK(s->n_children < LAUNCHER_CHILDREN_MAX);
    struct child *child = &s->children[s->n_children];
    memset(child, 0, sizeof *child);
    child->role = role;
    child->index = index;
    child->pid_fd = -1;
    child->incarnation = s->plan->generation;
    if (child_start(child, s->segment.fd) < 0)
        return -(int)error_kind_now();
    s->n_children++;
    fault_point(FAULT_launcher_child_started);
    return 0;
}

int session_open(struct launcher *l, const struct plan_request *request)
{
    struct session *s = &l->session;
    struct plan_request mine = *request;
    int fd = -1;
    memset(s, 0, sizeof *s);
    mine.generation = ++l->generation;
    if (plan_build(&s->plan, l, &mine) < 0)
        return -(int)error_kind_now();
    s->plan->store_expected = s->plan->mode == PLAN_TRAIN && metrics_has_steps(l->run.path);
    if (bind_channel(l) < 0 || segment_create(s->plan, &fd) < 0)
        return -(int)error_kind_now();
    fault_point(FAULT_launcher_segment_created);
    if (segment_attach(&s->segment, fd, ROLE_LAUNCHER, 0) < 0)
        return -(int)error_kind_now();
    attach_pages(s);
    if (l->run.lock_fd >= 0 &&
        run_dir_write_contact(&l->run, s->plan->endpoint, s->plan->token) < 0)
        return -(int)error_kind_now();
    return start_child(s, has_gpu(s->plan) ? ROLE_GPU : ROLE_IO, 0);
}

int session_start_rest(struct launcher *l)
{
    struct session *s = &l->session;
    if (!has_gpu(s->plan))
        return 0;
    if (start_child(s, ROLE_IO, 0) < 0)
        return -(int)error_kind_now();
    for (uint32_t i = 0; s->plan->mode == PLAN_TRAIN && i < s->plan->opt_workers; i++)
        if (start_child(s, ROLE_OPT, i) < 0)
            return -(int)error_kind_now();
    return 0;
}

const struct worker_control *session_control(const struct launcher *l, const struct child *child)
{
    const struct session *s = &l->session;
    return child->role == ROLE_IO ? s->io : child->role == ROLE_GPU ? s->gpu : s->opt[child->index];
}

int session_start_again(struct launcher *l, struct child *child)
{
    child->incarnation = l->generation;
    return child_start(child, l->session.segment.fd);
}

void session_release(struct launcher *l)
{
    l->moved_ns = 0; /* the watchdog begins anew */
    atomic_store_explicit(&l->session.orders->running_generation, l->generation,
                          memory_order_release);
    session_wake(l);
}

int session_introduced(const struct launcher *l, const struct child *child)
{
    return atomic_load_explicit(&session_control(l, child)->pid, memory_order_acquire) ==
           child->pid;
}

int session_ready(const struct launcher *l)
{
    const struct session *s = &l->session;
    uint32_t expected = 1;
    if (has_gpu(s->plan))
        expected = s->plan->mode == PLAN_TRAIN ? s->plan->opt_workers + 2 : 2;
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->children[i].state != CHILD_RUNNING || !session_introduced(l, &s->children[i]) ||
            atomic_load_explicit(&session_control(l, &s->children[i])->ready,
                                 memory_order_acquire) != l->generation)
            return 0;
    return s->n_children == expected;
}

static void send_to(struct session *s, const char *peer, enum message_type type, uint64_t step)
{
    struct message m = {.type = type,
                        .generation =
                            atomic_load_explicit(&s->orders->generation, memory_order_relaxed),
                        .step = step};
    memcpy(m.token, s->plan->token, sizeof m.token);
    (void)endpoint_send(s->endpoint, peer, &m); /* a dropped wake costs 100 ms */
}

void session_wake(struct launcher *l)
{
    char name[MESSAGE_PEER_BYTES];
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in worker_pause() */
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        const struct child *child = &l->session.children[i];
        if (!atomic_load_explicit(&session_control(l, child)->sleeping, memory_order_acquire))
            continue;
        worker_routing_id(name, child->role, child->index, child->incarnation);
        send_to(&l->session, name, MESSAGE_WAKE, 0);
    }
}

/* A doorbell names a worker; its present incarnation is meant. */
static void ring_bell(struct launcher *l, const char *worker)
{
    char name[MESSAGE_PEER_BYTES];
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        const struct child *child = &l->session.children[i];
        worker_name(name, child->role, child->index);
        if (strcmp(name, worker) != 0)
            continue;
        worker_routing_id(name, child->role, child->index, child->incarnation);
        send_to(&l->session, name, MESSAGE_WAKE, 0);
    }
}

static void take_message(struct launcher *l, const char *from, const struct message *m)
{
    struct session *s = &l->session;
    char kind = strncmp(from, "command.", 8) == 0 ? 'c' : 'w';
    int ours =
        mutant(MUTANT_stop_from_anybody) ||
        (strncmp(m->token, s->plan->token, sizeof m->token) == 0 &&
         (kind == 'c' || m->generation == l->generation) && message_allowed(m->type, kind, 'l'));
    if (!ours)
        return; /* a stranger, or an echo of an earlier generation */
    if (m->type == MESSAGE_DOORBELL) {
        ring_bell(l, m->text);
    } else if (m->type == MESSAGE_STOP) {
        uint64_t committed = coordinator_committed(l);
        if (!l->stop_requested) /* a resumed run may not have begun a step yet */
            l->stop_step = l->coordinator.begun > committed ? l->coordinator.begun : committed;
        l->stop_requested = 1;
        (void)snprintf(l->stop_peer, sizeof l->stop_peer, "%s", from);
        send_to(s, from, MESSAGE_STOPPING, l->stop_step);
    }
}

int session_wait(struct launcher *l, int timeout_ms)
{
    struct session *s = &l->session;
    int fds[LAUNCHER_CHILDREN_MAX + 1], ready[LAUNCHER_CHILDREN_MAX + 1], n = 0;
    char from[MESSAGE_PEER_BYTES];
    struct message m;
    fds[n++] = l->signal_fd;
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->children[i].state == CHILD_RUNNING)
            fds[n++] = s->children[i].pid_fd;
    int rc = endpoint_sleep(s->endpoint, fds, ready, n, timeout_ms);
    if (rc < 0)
        return error_set(ERROR_FAILED, "poll: %s", strerror(-rc));
    while (endpoint_receive(s->endpoint, from, &m) == 1)
        take_message(l, from, &m);
    return 0;
}

static int left_of(uint64_t start_ns, int ms)
{
    int left = ms - (int)(clock_seconds_since(start_ns) * 1e3);
    return left > 0 ? left : 0;
}

/* One deadline for all: those who leave in time leave in order, the others are killed. */
static int end_children(struct session *s, int grace_ms)
{
    char name[MESSAGE_PEER_BYTES];
    const struct child *stuck = NULL;
    uint64_t start = clock_now_ns();
    for (uint32_t i = 0; i < s->n_children; i++) {
        struct child *child = &s->children[i];
        if (child_wait(child, left_of(start, grace_ms)))
            continue;
        child_signal(child, SIGKILL);
        if (!child->kill_ns)
            child->kill_ns = clock_now_ns(); /* not `start`: the launcher may have been suspended */
    }
    for (uint32_t i = 0; i < s->n_children; i++) {
        struct child *child = &s->children[i];
        if (child->kill_ns &&
            !child_wait(child, left_of(child->kill_ns, (int)(watchdog_reap_s() * 1e3))))
            stuck = child;
    }
    if (!stuck || mutant(MUTANT_beside_the_unkillable))
        return 0;
    worker_name(name, stuck->role, stuck->index);
    (void)error_set(ERROR_FAILED, "%s (pid %d) cannot be killed; nothing is started beside it%s%s",
                    name, (int)stuck->pid, stuck->verdict[0] ? ": " : "", stuck->verdict);
    return error_hint("when that process is gone (its device may be stuck: dmesg), start again to "
                      "resume");
}

int session_close(struct launcher *l, int grace_ms)
{
    struct session *s = &l->session;
    if (!s->plan)
        return 0;
    if (s->orders) {
        atomic_store_explicit(&s->orders->stopping, 1, memory_order_release);
        if (grace_ms > 0)
            session_wake(l);
    }
    int rc = end_children(s, grace_ms);
    endpoint_close(s->endpoint);
    segment_detach(&s->segment);
    if (s->socket_dir[0]) {
        (void)unlink(s->plan->endpoint); /* libzmq removes it too */
        (void)rmdir(s->socket_dir);
    }
    free(s->plan);
    memset(s, 0, sizeof *s);
    memset(&l->restart, 0, sizeof l->restart);
    return rc;
}
