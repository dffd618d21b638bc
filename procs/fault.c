#include "procs/fault.h"

#include "procs/check.h"
#include "procs/error.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define X(name, sentence) #name,
static const char *const fault_names[] = {FAULT_POINTS(X)};
static const char *const action_names[] = {FAULT_ACTIONS(X)};
#undef X
#define X(name, sentence) " " #name
static const char fault_list[] = FAULT_POINTS(X);
static const char action_list[] = FAULT_ACTIONS(X);
#undef X
_Static_assert(sizeof fault_names / sizeof fault_names[0] == FAULT_COUNT, "each has a name");
_Static_assert(sizeof action_names / sizeof action_names[0] == FAULT_ACTION_COUNT, "likewise");

static const char variable[] = "MTLAUNCH_FAULT", once_variable[] = "MTLAUNCH_FAULT_ONCE",
                  seed_variable[] = "MTLAUNCH_FAULT_SEED";

enum { SCRIBBLE_LINGER_US = 100000 };

struct pool {
    unsigned char *base;
    uint64_t stride, frames;
};

enum fault fault_armed = FAULT_COUNT;
static struct fault_spec armed;
static const char *once_path;     /* NULL: acts in every process */
static _Atomic uint64_t arrivals; /* a fault point may lie in any thread */
static char process_name[FAULT_PROCESS_BYTES];
static struct pool pools[FAULT_POOLS_MAX];
static unsigned n_pools;
static uint64_t random_state = 1;

const char *fault_name(enum fault fault)
{
    CHECK(fault < FAULT_COUNT);
    return fault_names[fault];
}

const char *fault_action_name(enum fault_action action)
{
    CHECK(action < FAULT_ACTION_COUNT);
    return action_names[action];
}

/* Index of the name that is exactly `text` (bytes), or count. */
static unsigned name_find(const char *const *names, unsigned count, const char *text, size_t bytes)
{
    for (unsigned i = 0; i < count; i++)
        if (strlen(names[i]) == bytes && memcmp(names[i], text, bytes) == 0)
            return i;
    return count;
}

/* "" is the first arrival, ":3" the third. 0 or -1. */
static int nth_parse(const char *text, uint64_t *nth)
{
    *nth = 1;
    if (*text == '\0')
        return 0;
    size_t digits = strspn(text + 1, "0123456789");
    if (digits == 0 || text[1 + digits] != '\0')
        return -1;
    errno = 0;
    *nth = strtoull(text + 1, NULL, 10);
    return errno != 0 || *nth == 0 ? -1 : 0;
}

/* "@opt_worker.1" behind the name of the point, up to the colon. 0 or -1. */
static int process_parse(const char *text, size_t bytes, char *process)
{
    if (bytes == 0)
        return 0;
    if (bytes == 1 || bytes > FAULT_PROCESS_BYTES)
        return -1;
    memcpy(process, text + 1, bytes - 1);
    return 0;
}

int fault_parse(const char *text, struct fault_spec *spec)
{
    size_t head_bytes = strcspn(text, ":"), name_bytes = strcspn(text, "@:");
    memset(spec, 0, sizeof *spec);
    if (text[head_bytes] == '\0' ||
        process_parse(text + name_bytes, head_bytes - name_bytes, spec->process) < 0)
        return error_set(ERROR_USER, "%s: expected name[@process]:action[:nth], found \"%s\"",
                         variable, text);
    spec->fault = (enum fault)name_find(fault_names, FAULT_COUNT, text, name_bytes);
    if (spec->fault == FAULT_COUNT) {
        error_set(ERROR_USER, "%s: unknown fault point \"%.*s\"", variable, (int)name_bytes, text);
        return error_hint("fault points:%s", fault_list);
    }
    const char *action = text + head_bytes + 1;
    size_t action_bytes = strcspn(action, ":");
    spec->action =
        (enum fault_action)name_find(action_names, FAULT_ACTION_COUNT, action, action_bytes);
    if (spec->action == FAULT_ACTION_COUNT) {
        error_set(ERROR_USER, "%s: unknown action \"%.*s\"", variable, (int)action_bytes, action);
        return error_hint("actions:%s", action_list);
    }
    if (nth_parse(action + action_bytes, &spec->nth) < 0)
        return error_set(ERROR_USER, "%s: arrival: expected :1 or more, found \"%s\"", variable,
                         action + action_bytes);
    return 0;
}

void fault_arm(const struct fault_spec *spec)
{
    CHECK(spec->fault < FAULT_COUNT && spec->action < FAULT_ACTION_COUNT && spec->nth > 0);
    armed = *spec;
    atomic_store_explicit(&arrivals, 0, memory_order_relaxed);
    fault_armed = spec->fault;
}

void fault_disarm(void)
{
    fault_armed = FAULT_COUNT;
    n_pools = 0;
}

int fault_arm_from_environment(const char *process)
{
    const char *text = getenv(variable), *once = getenv(once_variable),
               *seed = getenv(seed_variable);
    if (!text || !*text)
        return 0;
    once_path = once && *once ? once : NULL;
    random_state = seed ? strtoull(seed, NULL, 10) : 1;
    (void)snprintf(process_name, sizeof process_name, "%s", process);
    struct fault_spec spec;
    int rc = fault_parse(text, &spec);
    if (rc == 0 && (!spec.process[0] || strcmp(spec.process, process) == 0))
        fault_arm(&spec);
    return rc;
}

void fault_offer_pool(void *base, uint64_t stride, uint64_t frames)
{
    if (n_pools < FAULT_POOLS_MAX && stride && frames)
        pools[n_pools++] = (struct pool){base, stride, frames};
}

/* splitmix64: any seed will do, 0 too. */
static uint64_t next_random(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void scribble_frame(unsigned char *frame, uint64_t stride)
{
    uint64_t from = next_random() % 2 ? 0 : next_random() % stride; /* a cursor lies at 0 */
    uint64_t end = from + 1 + next_random() % (stride - from);
    for (uint64_t i = from; i < end; i++)
        frame[i] = (unsigned char)(next_random() >> 56);
}

/* What a stray pointer could do: one frame, or each of a pool, whoever reads them now. */
static void scribble(void)
{
    if (n_pools == 0)
        return;
    const struct pool *pool = &pools[next_random() % n_pools];
    uint64_t n = next_random() % 2 ? 1 : pool->frames, first = next_random() % pool->frames;
    for (uint64_t i = 0; i < n; i++)
        scribble_frame(pool->base + (first + i) % pool->frames * pool->stride, pool->stride);
    if (next_random() % 2) /* a process that dumps core is not dead for a while */
        (void)usleep((useconds_t)(next_random() % SCRIBBLE_LINGER_US));
}

/* A handler or a mask of this process must not turn the fault into something else. */
static void die_of(int number)
{
    sigset_t set;
    (void)signal(number, SIG_DFL);
    (void)sigemptyset(&set);
    (void)sigaddset(&set, number);
    (void)pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    (void)raise(number);
}

static void act(enum fault_action action)
{
    switch (action) {
    case FAULT_ACTION_scribble:
        scribble();
        (void)kill(getpid(), SIGKILL);
        break;
    case FAULT_ACTION_kill:
        (void)kill(getpid(), SIGKILL);
        break;
    case FAULT_ACTION_stop:
        (void)kill(getpid(), SIGSTOP);
        return; /* SIGCONT goes on from here */
    case FAULT_ACTION_segv:
        die_of(SIGSEGV);
        break;
    case FAULT_ACTION_abort:
        abort();
    case FAULT_ACTION_exit0:
        _exit(0);
    case FAULT_ACTION_check:
        CHECK(!"a fault point asked for this");
        break;
    case FAULT_ACTION_hang:
    case FAULT_ACTION_COUNT:
        break;
    }
    for (;;)
        (void)pause(); /* a signal may arrive; nothing may go on */
}

/* Whether this is the first process that comes here; without MTLAUNCH_FAULT_ONCE each is. */
static int is_first(void)
{
    if (!once_path)
        return 1;
    int fd = open(once_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return 0;
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)dprintf(fd, "%s %d %lld.%09ld\n", process_name, (int)getpid(), (long long)now.tv_sec,
                  now.tv_nsec); /* for measuring; that the file exists is what counts */
    (void)close(fd);
    return 1;
}

void fault_arrived(void)
{
    if (atomic_fetch_add_explicit(&arrivals, 1, memory_order_relaxed) + 1 != armed.nth ||
        !is_first())
        return;
    (void)dprintf(STDERR_FILENO, "fault point %s: %s at arrival %llu\n", fault_name(armed.fault),
                  fault_action_name(armed.action), (unsigned long long)armed.nth);
    act(armed.action);
}
