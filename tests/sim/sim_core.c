/* Coroutines, the scheduler, the clock, random numbers, and the private memory of a process. */
#include "tests/sim/sim.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { STACK_BYTES = 256 << 10, ARENA_BYTES = 8 << 20, ALIGNMENT = 64 };

struct sim sim;
static void *scheduler_stack_pointer;

/* -- random numbers: splitmix64, one stream for everything that a schedule decides -- */

uint64_t sim_random(void)
{
    uint64_t z = (sim.random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t sim_below(uint64_t n)
{
    return n ? sim_random() % n : 0;
}

int sim_chance(unsigned one_in)
{
    return one_in && sim_below(one_in) == 0;
}

/* -- what is told -- */

void sim_violation(const char *format, ...)
{
    va_list args;
    if (sim.violation)
        return;
    va_start(args, format);
    (void)vsnprintf(sim.violation_text, sizeof sim.violation_text, format, args);
    va_end(args);
    sim.violation = sim.violation_text;
    sim.over = 1;
    sim_trace("VIOLATION %s", sim.violation);
}

void sim_trace(const char *format, ...)
{
    char text[1024];
    va_list args;
    if (!sim.trace)
        return;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct sim_process *p = sim.current < 0 ? NULL : &sim.processes[sim.current];
    (void)printf("%7llu %10.6f %s%.0u %s\n", (unsigned long long)sim.tick,
                 (double)sim.now_ns * 1e-9, p ? topology_role_name(p->role) : "-", p ? p->index : 0,
                 text);
}

/* -- switching: callee-saved registers on the stack, nothing else -- */

void sim_switch(void **save, void *load);
__asm__(".text\n"
        ".type sim_switch, @function\n"
        "sim_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size sim_switch, . - sim_switch\n");

static void to_scheduler(struct sim_process *p)
{
    p->errno_kept = errno;
    sim_switch(&p->stack_pointer, scheduler_stack_pointer);
    errno = p->errno_kept;
}

static void begin(void)
{
    struct sim_process *p = sim_self();
    int status = p->entry(p) & 0xff;
    if (status == ERROR_DAMAGED)
        sim_on_damage(p);
    sim_exit(status);
}

static void resume(struct sim_process *p)
{
    sim.current = (int)(p - sim.processes);
    sim_switch(&scheduler_stack_pointer, p->stack_pointer);
    sim.current = -1;
}

struct sim_process *sim_self(void)
{
    return sim.current < 0 ? NULL : &sim.processes[sim.current];
}

void sim_yield(void)
{
    if (sim.current < 0)
        return;
    if (++sim.yields < sim.attention && --sim.countdown > 0)
        return;
    sim.countdown = 1 + (int)(sim_random() % (2 * sim.stretch - 1));
    to_scheduler(sim_self());
}

void sim_sleep(void)
{
    struct sim_process *p = sim_self();
    p->state = SIM_SLEEPING;
    to_scheduler(p);
    p->sleeps_for_child = 0;
    p->sleeps_for_engine = -1;
    p->sleeps_for_message = NULL;
}

/* -- life and death -- */

struct sim_process *sim_find(int pid)
{
    for (int i = 0; i < SIM_PROCESSES_MAX; i++)
        if (sim.processes[i].state != SIM_FREE && sim.processes[i].pid == pid)
            return &sim.processes[i];
    return NULL;
}

static struct sim_process *free_place(void)
{
    for (int i = 0; i < SIM_PROCESSES_MAX; i++)
        if (sim.processes[i].state == SIM_FREE)
            return &sim.processes[i];
    (void)fprintf(stderr, "sim: more than %d processes\n", SIM_PROCESSES_MAX);
    abort();
}

struct sim_process *sim_spawn(enum role role, uint32_t index, int (*entry)(struct sim_process *))
{
    struct sim_process *p = free_place(), *parent = sim_self();
    unsigned char *stack = p->stack, *arena = p->arena;
    memset(p, 0, sizeof *p);
    p->stack = stack;
    p->arena = arena;
    p->state = SIM_RUNNABLE;
    p->pid = sim.next_pid++;
    p->parent = parent ? parent->pid : 1;
    p->role = role;
    p->index = index;
    p->entry = entry;
    p->sleeps_for_engine = -1;
    sim.live[sim.n_live++] = (int)(p - sim.processes);
    void **top = (void **)(void *)(p->stack + STACK_BYTES);
    *--top = NULL; /* a return address for begin(), which never returns; also aligns its frame */
    *--top = (void *)(uintptr_t)begin;
    for (int i = 0; i < 6; i++)
        *--top = NULL;
    p->stack_pointer = top;
    sim_trace("start of %s.%u, pid %d", topology_role_name(role), index, p->pid);
    return p;
}

void sim_doom(struct sim_process *p, uint64_t ticks)
{
    p->doomed_tick = sim.tick + ticks;
    sim.doomed = 1;
}

/* The launcher's children follow it at once or a little later, as signals do. */
static void doom_children(const struct sim_process *parent)
{
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        struct sim_process *p = &sim.processes[i];
        if (p->state == SIM_FREE || p->parent != parent->pid)
            continue;
        p->parent = 1;
        if (p->state == SIM_ZOMBIE)
            p->state = SIM_FREE;
        else
            sim_doom(p, 1 + sim_below(40));
    }
}

void sim_not_live(int process)
{
    for (int i = 0; i < sim.n_live; i++)
        if (sim.live[i] == process) {
            sim.live[i] = sim.live[--sim.n_live];
            break;
        }
    sim.deaths++;
}

void sim_kill(struct sim_process *p, int status)
{
    int index = (int)(p - sim.processes);
    sim_trace("end of %s.%u, pid %d: status %#x", topology_role_name(p->role), p->index, p->pid,
              (unsigned)status);
    sim_process_gone(p);
    sim_disk_orphan(index);
    sim_ipc_gone(index);
    p->status = status;
    struct sim_process *parent = sim_find(p->parent);
    p->state = parent && parent->state != SIM_ZOMBIE ? SIM_ZOMBIE : SIM_FREE;
    sim_not_live(index);
    doom_children(p);
    if (p->state == SIM_ZOMBIE && parent->state == SIM_SLEEPING && parent->sleeps_for_child)
        parent->state = SIM_RUNNABLE; /* it looks again */
}

_Noreturn void sim_die(int status)
{
    struct sim_process *p = sim_self();
    sim_kill(p, status);
    for (;;)
        to_scheduler(p); /* never resumed */
}

_Noreturn void sim_exit(int status)
{
    sim_die((status & 0xff) << 8);
}

_Noreturn void sim_abort(void)
{
    sim_die(SIGABRT);
}

/* -- the scheduler -- */

static int wakes(const struct sim_process *p)
{
    return p->wake_ns <= sim.now_ns ||
           (p->sleeps_for_message && p->sleeps_for_message->n_inbox > 0) ||
           (p->sleeps_for_engine >= 0 && sim_disk_readable(p->sleeps_for_engine));
}

int sim_is_stuck(const struct sim_process *p)
{
    return p->stuck_until_ns > sim.now_ns;
}

static void kill_doomed(void)
{
    sim.doomed = 0;
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        struct sim_process *p = &sim.processes[i];
        if (p->state == SIM_FREE || p->state == SIM_ZOMBIE || !p->doomed_tick)
            continue;
        if (sim.tick >= p->doomed_tick && !sim_is_stuck(p))
            sim_kill(p, SIGKILL);
        else
            sim.doomed = 1;
    }
}

/* Who may be picked. */
static int find_able(int able[SIM_PROCESSES_MAX])
{
    int n = 0;
    if (sim.doomed)
        kill_doomed();
    for (int i = 0; i < sim.n_live; i++) {
        struct sim_process *p = &sim.processes[sim.live[i]];
        if (p->state == SIM_SLEEPING && wakes(p))
            p->state = SIM_RUNNABLE;
        if (p->state == SIM_RUNNABLE && p->stopped_until_ns <= sim.now_ns)
            able[n++] = sim.live[i];
    }
    return n;
}

/* To the next moment at which somebody wakes by the clock. */
static int pass_time(void)
{
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < sim.n_live; i++) {
        const struct sim_process *p = &sim.processes[sim.live[i]];
        uint64_t at = p->state == SIM_SLEEPING ? p->wake_ns : p->stopped_until_ns;
        if (at < p->stopped_until_ns)
            at = p->stopped_until_ns;
        if (at > sim.now_ns && at < next)
            next = at;
    }
    if (next == UINT64_MAX)
        return 0;
    sim.now_ns = next;
    return 1;
}

static void pick_process(const int *able, int n)
{
    int chosen = able[sim_below((uint64_t)n)];
    if (chosen == sim.starved && n > 1 && !sim_chance(16))
        chosen = able[sim_below((uint64_t)n)];
    resume(&sim.processes[chosen]);
}

int sim_tick(void)
{
    int able[SIM_PROCESSES_MAX];
    sim.tick++;
    sim.now_ns += 1000 + sim_random() % 8192;
    int n = find_able(able);
    unsigned process = n ? sim.weight_process : 0;
    unsigned io = disk.in_flight ? sim.weight_io : 0;
    unsigned message = sim_ipc_on_their_way() ? sim.weight_message : 0;
    unsigned time = process + io + message ? sim.weight_time : 1;
    uint64_t at = sim_below(process + io + message + time);
    if (at < process)
        pick_process(able, n);
    else if (at < process + io)
        return sim_disk_land_one();
    else if (at < process + io + message)
        return sim_ipc_deliver();
    else
        return pass_time() || process + io + message || sim.doomed;
    return 1;
}

/* -- private memory: a stack of allocations, gone with its process -- */

int sim_is_private(const void *p)
{
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        const unsigned char *arena = sim.processes[i].arena, *at = p;
        if (at >= arena && at < arena + ARENA_BYTES)
            return 1;
        if (at >= sim.processes[i].stack && at < sim.processes[i].stack + STACK_BYTES)
            return 1;
    }
    return 0;
}

static void *take(uint64_t bytes, uint64_t alignment)
{
    struct sim_process *p = sim_self();
    if (!p)
        return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    uint64_t at = (p->arena_used + alignment - 1) / alignment * alignment + alignment;
    if (at + bytes > ARENA_BYTES)
        return NULL;
    memcpy(p->arena + at - sizeof at, &p->arena_used, sizeof at); /* what freeing it goes back to */
    p->arena_last = at;
    p->arena_used = at + bytes;
    return p->arena + at;
}

void *sim_malloc(size_t bytes);
void *sim_malloc(size_t bytes)
{
    return take(bytes, ALIGNMENT);
}

void *sim_calloc(size_t n, size_t bytes);
void *sim_calloc(size_t n, size_t bytes)
{
    void *p = take(n * bytes, ALIGNMENT);
    return p ? memset(p, 0, n * bytes) : NULL;
}

int sim_posix_memalign(void **out, size_t alignment, size_t bytes);
int sim_posix_memalign(void **out, size_t alignment, size_t bytes)
{
    *out = take(bytes, alignment < ALIGNMENT ? ALIGNMENT : alignment);
    return *out ? 0 : ENOMEM;
}

char *sim_strdup(const char *text);
char *sim_strdup(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = sim_malloc(n);
    return copy ? memcpy(copy, text, n) : NULL;
}

void sim_free(void *memory);
void sim_free(void *memory)
{
    struct sim_process *p = sim_self();
    unsigned char *at = memory;
    if (!memory)
        return;
    if (!sim_is_private(memory)) {
        free(memory); /* of the C library's streams */
    } else if (p && at == p->arena + p->arena_last) {
        memcpy(&p->arena_used, at - sizeof p->arena_used, sizeof p->arena_used);
        p->arena_last = 0;
    }
}

/* -- opening -- */

static unsigned char *map(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("sim: mmap");
        exit(1);
    }
    return p;
}

void sim_core_open(void)
{
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        sim.processes[i].stack = map(STACK_BYTES);
        sim.processes[i].arena = map(ARENA_BYTES);
    }
    sim.current = -1;
}

void sim_core_reset(uint64_t seed)
{
    for (int i = 0; i < SIM_PROCESSES_MAX; i++)
        sim.processes[i].state = SIM_FREE;
    sim.random = seed * 0x2545f4914f6cdd1du + 1;
    sim.now_ns = 1000000000u;
    sim.tick = sim.yields = 0;
    sim.attention = UINT64_MAX;
    sim.current = -1;
    sim.next_pid = 100;
    sim.violation = NULL;
    sim.over = 0;
    sim.stretch = sim_chance(24) ? 1 : 2u << sim_below(6);
    sim.countdown = 1;
    sim.n_live = sim.doomed = 0;
    sim.weight_process = 64;
    sim.weight_io = 1u << (1 + sim_below(7));
    sim.weight_message = 1u << (1 + sim_below(7));
    sim.weight_time = sim_chance(3) ? 1 : 0;
    sim.starved = sim_chance(3) ? (int)sim_below(6) : -1;
}
