#include "ipc/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/lifeline.h"
#include "procs/log.h"
#include "procs/printable.h"

void worker_name(char *text, enum role role, uint32_t index)
{
    (void)snprintf(text, MESSAGE_PEER_BYTES, "%s.%u", topology_role_name(role), index);
}

void worker_routing_id(char *text, enum role role, uint32_t index, uint32_t incarnation)
{
    (void)snprintf(text, MESSAGE_PEER_BYTES, "%s.%u#%u", topology_role_name(role), index,
                   incarnation);
}

static void send_message(struct worker *w, enum message_type type, uint64_t a, const char *text)
{
    struct message m = {.type = type, .generation = w->segment.generation, .a = a};
    memcpy(m.token, w->plan->token, sizeof m.token);
    (void)snprintf(m.text, sizeof m.text, "%s", text);
    (void)endpoint_send(w->endpoint, NULL, &m); /* dropped: the launcher re-reads within 100 ms */
}

static enum region_id control_region(enum role role)
{
    return role == ROLE_IO    ? REGION_IO_CONTROL
           : role == ROLE_GPU ? REGION_GPU_CONTROL
                              : REGION_OPT_CONTROL;
}

static int parse_arguments(int argc, char **argv, int *fd, uint32_t *index)
{
    if (argc != 3)
        return error_set(ERROR_USER, "%s is started by mtlaunch, not by hand", argv[0]);
    *fd = atoi(argv[1]);
    *index = (uint32_t)strtoul(argv[2], NULL, 10);
    return 0;
}

/* Terminal signals are the launcher's to interpret: a worker leaves when it is told, or dies with
 * it. */
static int follow_launcher(struct worker *w)
{
    w->parent_pid =
        w->plan->launcher_pid; /* not simply getppid(): in a container the launcher may be 1 */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        return error_set(ERROR_FAILED, "prctl: %s", strerror(errno));
    (void)signal(SIGINT, SIG_IGN);
    (void)signal(SIGHUP, SIG_IGN);
    (void)signal(SIGPIPE, SIG_IGN);
    return getppid() != w->parent_pid ? error_set(ERROR_FAILED, "the launcher is gone") : 0;
}

/* The control page may hold the last words of a process that died in this place. What it did (step
 * results, hashes, counters of complete steps) stays. */
static void forget_predecessor(struct worker_control *self)
{
    atomic_store_explicit(&self->error_kind, 0, memory_order_relaxed);
    self->error[0] = self->panic[0] = self->message[0] = self->oldest_io[0] = '\0';
    atomic_store_explicit(&self->oldest_io_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&self->ready, 0, memory_order_relaxed);
    atomic_store_explicit(&self->acknowledged, 0, memory_order_relaxed);
    atomic_store_explicit(&self->sleeping, 0, memory_order_relaxed);
    atomic_store_explicit(&self->operation, OPERATION_START, memory_order_relaxed);
}

/* Arms the fault point that the environment names; `scribble` gets the pools and the sides of rings
 * that this role writes. */
static int arm_fault(const struct segment *s, enum role role, const char *name)
{
    const struct plan *plan = s->plan;
    for (uint32_t i = 0; i < OPT_WORKERS_MAX; i++) {
        for (int r = 0; r < REGION_COUNT; r++)
            if (topology_regions[r].access[role][0] == 'w' && s->regions[r][i])
                fault_offer_pool(s->regions[r][i], plan->pools[r].stride, plan->pools[r].frames);
        for (int r = 0; r < RING_COUNT; r++) {
            if (topology_rings[r].from == role && s->producers[r][i])
                fault_offer_pool(s->producers[r][i], plan->ring_producers[r].stride, 1);
            if (topology_rings[r].to == role && s->consumers[r][i])
                fault_offer_pool(s->consumers[r][i], plan->ring_consumers[r].stride, 1);
        }
    }
    return fault_arm_from_environment(name);
}

static int introduce(struct worker *w, enum role role, uint32_t index, const char *name)
{
    char id[MESSAGE_PEER_BYTES];
    w->self = segment_region(&w->segment, control_region(role), role == ROLE_OPT ? index : 0);
    w->orders = segment_region(&w->segment, REGION_LAUNCHER_CONTROL, 0);
    w->self->magic = CONTROL_MAGIC;
    w->self->role = role;
    w->self->index = index;
    uint32_t generation = atomic_load_explicit(&w->orders->generation, memory_order_acquire);
    if (generation)
        w->segment.generation = generation; /* this one takes the place of one that died */
    w->self->incarnation = w->segment.generation;
    forget_predecessor(w->self);
    /* release: pairs with the acquire in session_introduced(); from here on the page is ours */
    atomic_store_explicit(&w->self->pid, getpid(), memory_order_release);
    check_set_panic_buffer(w->self->panic, sizeof w->self->panic);
    /* commands have no log: their errors travel through the control page */
    if (!*plan_text_get(w->plan, w->plan->log_dir))
        log_set_threshold(LOG_ERROR);
    else if (log_open(plan_text_get(w->plan, w->plan->log_dir), name, w->plan->log_bytes_max) < 0)
        return -(int)error_kind_now();
    char address[PLAN_ENDPOINT_BYTES + 8];
    (void)snprintf(address, sizeof address, "ipc://%s", w->plan->endpoint);
    worker_routing_id(id, role, index, w->segment.generation);
    if (endpoint_connect(&w->endpoint, address, id) < 0)
        return -(int)error_kind_now();
    send_message(w, MESSAGE_HELLO, (uint64_t)getpid(), "");
    return 0;
}

int worker_start(struct worker *w, enum role role, int argc, char **argv)
{
    char name[MESSAGE_PEER_BYTES];
    int fd = -1;
    uint32_t index = 0;
    memset(w, 0, sizeof *w);
    (void)prctl(PR_SET_NAME, topology_role_name(role)); /* started by descriptor, it has a number */
    w->event_fd = -1;
    if (parse_arguments(argc, argv, &fd, &index) < 0 ||
        segment_attach(&w->segment, fd, role, index) < 0)
        return -(int)error_kind_now();
    w->plan = w->segment.plan;
    worker_name(name, role, index);
    if (follow_launcher(w) < 0 || arm_fault(&w->segment, role, name) < 0)
        return -(int)error_kind_now();
    fault_point(FAULT_worker_attached);
    if (introduce(w, role, index, name) < 0 ||
        model_layout_init(&w->layout, &w->plan->model, w->plan->page_elements) < 0)
        return -(int)error_kind_now();
    log_line(LOG_INFO, "started, pid %d, generation %u", (int)getpid(), w->segment.generation);
    w->beat_ns = clock_now_ns();
    return 0;
}

void worker_ready(struct worker *w)
{
    fault_point(FAULT_worker_before_ready);
    worker_progress(w, ACTIVITY_WORKING, 0, 0);
    segment_reset_rings(&w->segment);
    worker_operation(w, OPERATION_IDLE);
    atomic_store_explicit(&w->self->ready, w->segment.generation, memory_order_release);
    if (w->segment.generation > w->plan->generation)
        fault_point(FAULT_worker_ready_again);
    send_message(w, MESSAGE_READY, 0, "");
    log_line(LOG_INFO, "ready, generation %u", w->segment.generation);
}

int worker_wait_running(struct worker *w)
{
    int rc = 0;
    while (rc == 0 && atomic_load_explicit(&w->orders->running_generation, memory_order_acquire) !=
                          w->segment.generation)
        rc = worker_pause(w, WORKER_WAIT_OTHER);
    return rc;
}

int worker_finish(struct worker *w, int rc)
{
    int status = rc < 0 ? -rc : 0;
    if (rc < 0 && rc != -ERROR_STOPPED) {
        if (w->self) {
            (void)snprintf(w->self->error, sizeof w->self->error, "%s", error_text());
            atomic_store_explicit(&w->self->error_kind, (uint32_t)status, memory_order_release);
            if (*plan_text_get(w->plan, w->plan->log_dir))
                log_line(LOG_ERROR, "%s", error_text());
        } else {
            printable_put(error_text(), stderr);
            (void)fputc('\n', stderr);
        }
        if (w->endpoint)
            send_message(w, MESSAGE_FAILED, (uint64_t)status, error_text());
    }
    if (w->plan)
        log_line(LOG_INFO, "leaving, status %d", status);
    log_close();
    endpoint_close(w->endpoint);
    model_layout_destroy(&w->layout);
    check_set_panic_buffer(NULL, 0); /* it lies in the segment */
    fault_disarm();                  /* so do the pools */
    segment_detach(&w->segment);
    return status;
}

void worker_operation(struct worker *w, enum worker_operation operation)
{
    atomic_store_explicit(&w->self->operation, (uint32_t)operation, memory_order_relaxed);
}

/* Counts how long the operation at hand took since the last beat, for the watchdog's deadline. */
static void beat(struct worker *w)
{
    struct worker_control *self = w->self;
    uint64_t now = clock_now_ns(), us = (now - w->beat_ns) / 1000;
    unsigned bucket = us ? 63u - (unsigned)__builtin_clzll(us) : 0;
    uint32_t operation = atomic_load_explicit(&self->operation, memory_order_relaxed);
    if (bucket >= CONTROL_BEAT_BUCKETS)
        bucket = CONTROL_BEAT_BUCKETS - 1;
    _Atomic uint32_t *count = &self->beats[operation % OPERATION_COUNT][bucket];
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    w->beat_ns = now;
    atomic_fetch_add_explicit(&self->heartbeat, 1, memory_order_relaxed);
}

static int must_leave(struct worker *w)
{
    if (atomic_load_explicit(&w->orders->stopping, memory_order_acquire))
        return error_set(ERROR_STOPPED, "told to leave");
    if (getppid() != w->parent_pid || lifeline_is_cut())
        return error_set(ERROR_STOPPED, "the launcher is gone");
    return 0;
}

static int look(struct worker *w)
{
    beat(w);
    int rc = must_leave(w);
    if (rc == 0 && atomic_load_explicit(&w->orders->abort_generation, memory_order_acquire) >
                       w->segment.generation)
        rc = error_set(ERROR_ABANDONED, "another worker died");
    return rc == 0 ? segment_check_rings(&w->segment) : rc;
}

int worker_check(struct worker *w)
{
    uint64_t turns = atomic_load_explicit(&w->self->turns, memory_order_relaxed);
    atomic_store_explicit(&w->self->turns, turns + 1, memory_order_relaxed); /* one writer */
    return look(w);
}

/* Messages only wake: what they say stands in shared memory. */
static void drain(struct worker *w)
{
    struct message m;
    while (endpoint_receive(w->endpoint, NULL, &m) == 1)
        ;
}

static void count_wait(struct worker *w, int why, uint64_t since_ns)
{
    if (why < RING_COUNT)
        atomic_fetch_add_explicit(&w->self->wait_ns[why], clock_now_ns() - since_ns,
                                  memory_order_relaxed);
}

/* One sleep, or the raising of the flag before it. */
static int doze(struct worker *w, int why)
{
    if (!w->armed) {
        atomic_store_explicit(&w->self->sleeping, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in worker_bell() */
        w->armed = 1;
        return 0;
    }
    uint64_t since = clock_now_ns();
    int ready = 0;
    int rc = endpoint_sleep(w->endpoint, &w->event_fd, &ready, w->event_fd >= 0, WORKER_POLL_MS);
    atomic_store_explicit(&w->self->sleeping, 0, memory_order_relaxed);
    w->armed = 0;
    drain(w);
    count_wait(w, why, since);
    w->beat_ns = clock_now_ns(); /* sleep is no operation's time */
    return rc < 0 ? error_set(ERROR_FAILED, "poll: %s", strerror(-rc)) : 0;
}

int worker_pause(struct worker *w, int why)
{
    int rc = look(w);
    return rc < 0 ? rc : doze(w, why);
}

int worker_rejoin(struct worker *w)
{
    const struct launcher_control *o = w->orders;
    int rc = 0;
    log_line(LOG_INFO, "another worker died: the operation is abandoned");
    for (uint32_t wanted, told = 0; rc == 0;) {
        wanted = atomic_load_explicit(&o->abort_generation, memory_order_acquire);
        if (atomic_load_explicit(&o->generation, memory_order_acquire) == wanted)
            break;
        if (told != wanted) { /* or another death while this one was being dealt with */
            fault_point(FAULT_worker_abandoned);
            atomic_store_explicit(&w->self->acknowledged, wanted, memory_order_release);
            fault_point(FAULT_worker_acknowledged);
            worker_fact(w);
            told = wanted;
        }
        beat(w);
        if ((rc = must_leave(w)) == 0)
            rc = doze(w, WORKER_WAIT_OTHER);
    }
    w->segment.generation = atomic_load_explicit(&o->generation, memory_order_acquire);
    return rc;
}

void worker_fact(struct worker *w)
{
    send_message(w, MESSAGE_FACT, 0, "");
}

void worker_bell(struct worker *w, enum role role, uint32_t index)
{
    const struct worker_control *peer =
        segment_region(&w->segment, control_region(role), role == ROLE_OPT ? index : 0);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in worker_pause() */
    if (!atomic_load_explicit(&peer->sleeping, memory_order_relaxed))
        return;
    char name[MESSAGE_PEER_BYTES];
    worker_name(name, role, index);
    send_message(w, MESSAGE_DOORBELL, 0, name);
}

void worker_progress(struct worker *w, enum worker_activity activity, uint64_t done, uint64_t total)
{
    atomic_store_explicit(&w->self->progress.activity, (uint32_t)activity, memory_order_relaxed);
    atomic_store_explicit(&w->self->progress.done, done, memory_order_relaxed);
    atomic_store_explicit(&w->self->progress.total, total, memory_order_relaxed);
}
