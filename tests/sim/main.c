/*
 * Many schedules: which, on how many cores, and what came of them.
 *
 *     sim --schedules N [--first SEED] [--jobs J]     N schedules from SEED on
 *     sim --soak SECONDS [--commit NAME] [--ledger FILE]
 *                                                     fresh seeds; appends one JSON line at the end
 *     sim --seed N [--trace] [--mutant NAME]          one schedule again
 *     sim --sweep                                     every I/O of a short run x every fault
 *     sim --mutants                                   each switched-off mechanism is noticed
 *
 * A batch of 256 schedules shares one configuration and one process, so that what killed processes
 * leave in memory goes with it, and so that a simulator that dies is a violation like any other.
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    BATCH = 256,
    JOBS_MAX = 64,
    SHOWN_MAX = 10,
    MUTANT_SCHEDULES_MAX = 40000,
    SWEEP_CONFIGURATIONS = 2,
};

enum mutant mutant_now;

extern void __gcov_dump(void) __attribute__((weak));

static const struct {
    const char *name, *sentence;
} mutants[MUTANT_COUNT] = {{"none", ""},
#define X(name, sentence) {#name, sentence},
                           MUTANTS(X)
#undef X
};

/* What batches add up, in memory that parent and children share. */
struct totals {
    uint64_t schedules, done, kills, power_cuts, stops, requests, sessions, launchers, operations,
        ticks;
    uint64_t faults[DISK_FAULT_COUNT], recoveries[5];
    uint64_t violations;
    uint64_t cpu_us;
    uint64_t seed; /* being run */
    uint64_t bad_seed;
    char bad_text[512];
};

static struct totals *shared; /* [JOBS_MAX] */
static struct totals all;
static int shown;

static uint64_t now_us(clockid_t clock)
{
    struct timespec t;
    (void)clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000;
}

static void add(struct totals *t, const struct sim_result *r)
{
    t->schedules++;
    t->done += (uint64_t)r->done;
    t->kills += r->kills;
    t->power_cuts += r->power_cuts;
    t->stops += r->stops;
    t->requests += r->requests;
    t->sessions += r->sessions;
    t->launchers += r->launchers;
    t->operations += r->operations;
    t->ticks += r->ticks;
    for (int f = 0; f < DISK_FAULT_COUNT; f++)
        t->faults[f] += r->faults[f];
    for (int i = 0; i < 5; i++)
        t->recoveries[i] += r->recoveries[i];
    if (!r->violation)
        return;
    if (t->violations++ == 0) {
        t->bad_seed = r->seed;
        (void)snprintf(t->bad_text, sizeof t->bad_text, "%s", r->violation);
    }
}

/* -- batches -- */

/* The undisturbed run is made without the mutant; it is the truth. */
static int prepare(uint64_t configuration)
{
    enum mutant wanted = mutant_now;
    int trace = sim.trace;
    mutant_now = MUTANT_none; /* the truth */
    sim.trace = 0;
    sim_stand_configure(configuration);
    int rc = sim_run_golden(configuration);
    mutant_now = wanted;
    sim.trace = trace;
    return rc;
}

static void golden_failed(struct totals *t, uint64_t seed)
{
    t->violations++;
    t->bad_seed = seed;
    (void)snprintf(t->bad_text, sizeof t->bad_text, "undisturbed run: %s", sim.violation);
}

static void run_seeds(struct totals *t, uint64_t first, uint64_t n)
{
    struct sim_result result;
    if (prepare(first / BATCH) < 0) {
        golden_failed(t, first);
        return;
    }
    for (uint64_t seed = first; seed < first + n && !(mutant_now && t->violations); seed++) {
        t->seed = seed;
        sim_run_random(seed, &result);
        add(t, &result);
    }
}

static const enum disk_fault swept[] = {
    DISK_CUT_BEFORE, DISK_CUT_AFTER, DISK_CUT_TORN, DISK_KILL_BEFORE, DISK_KILL_AFTER,
    DISK_EIO,        DISK_EIO_EVER,  DISK_SHORT,    DISK_EINTR,       DISK_FLUSH_FAILS};
enum { SWEPT = sizeof swept / sizeof swept[0] };

/* Every operation x every fault; alone, and with a second fault in what follows. */
static void run_sweep(struct totals *t, uint64_t configuration, uint64_t from_nothing)
{
    struct sim_result result;
    if (prepare(configuration) < 0) {
        golden_failed(t, configuration);
        return;
    }
    for (uint64_t i = 0; i < golden.operations; i++)
        for (uint64_t f = 0; f < 2 * SWEPT; f++) {
            uint64_t seed = (configuration * 4096 + i) * 64 + f * 2 + from_nothing;
            struct disk_plan plans[] = {
                {i, swept[f % SWEPT]},
                {i + 1 + sim_hash(seed, 1) % 80, swept[sim_hash(seed, 2) % SWEPT]}};
            t->seed = seed;
            sim_run_planned(plans, f < SWEPT ? 1 : 2, seed, from_nothing != 0, &result);
            add(t, &result);
        }
}

typedef void batch_function(struct totals *t, uint64_t a, uint64_t b);

static void begin_batch(int job, batch_function *batch, uint64_t a, uint64_t b, pid_t *pid)
{
    memset(&shared[job], 0, sizeof shared[job]);
    (void)fflush(NULL);
    *pid = fork();
    if (*pid != 0)
        return;
    uint64_t start = now_us(CLOCK_PROCESS_CPUTIME_ID);
    batch(&shared[job], a, b);
    shared[job].cpu_us = now_us(CLOCK_PROCESS_CPUTIME_ID) - start;
    if (__gcov_dump)
        __gcov_dump(); /* make coverage */
    _exit(0);
}

static void sum(struct totals *to, const struct totals *from)
{
    uint64_t *a = &to->schedules;
    const uint64_t *b = &from->schedules;
    for (size_t i = 0; i < offsetof(struct totals, seed) / sizeof *a; i++)
        a[i] += b[i];
}

static void show(const struct totals *t)
{
    if (shown++ >= SHOWN_MAX)
        return;
    (void)printf("violation: seed %llu: %s\n    again: build/sim/bin/sim --seed %llu --trace%s%s\n",
                 (unsigned long long)t->bad_seed, t->bad_text, (unsigned long long)t->bad_seed,
                 mutant_now ? " --mutant " : "", mutant_now ? mutants[mutant_now].name : "");
}

static void end_batch(int job, int status)
{
    struct totals *t = &shared[job];
    if (status != 0) {
        t->violations++;
        t->bad_seed = t->seed;
        (void)snprintf(t->bad_text, sizeof t->bad_text, "the simulator ended with status %#x",
                       (unsigned)status);
    }
    sum(&all, t);
    if (t->violations && all.violations == t->violations) {
        all.bad_seed = t->bad_seed;
        memcpy(all.bad_text, t->bad_text, sizeof all.bad_text);
    }
    if (t->violations && !mutant_now)
        show(t);
}

/* Batches until next() says there are no more, `jobs` at a time. */
static void run_batches(int jobs, batch_function *batch, int (*next)(uint64_t *a, uint64_t *b))
{
    pid_t pids[JOBS_MAX] = {0};
    int running = 0, more = 1;
    while (more || running) {
        uint64_t a, b;
        int job = 0;
        while (job < jobs && pids[job])
            job++;
        if (more && job < jobs) {
            more = next(&a, &b);
            if (more) {
                begin_batch(job, batch, a, b, &pids[job]);
                running++;
            }
            continue;
        }
        int status;
        pid_t pid = wait(&status);
        for (job = 0; job < jobs && pids[job] != pid; job++)
            ;
        if (pid <= 0 || job == jobs)
            continue;
        pids[job] = 0;
        running--;
        end_batch(job, status);
    }
}

/* -- what to run -- */

static struct {
    uint64_t next, end, deadline_us;
} work;

static int next_seeds(uint64_t *first, uint64_t *n)
{
    if (work.next >= work.end || (work.deadline_us && now_us(CLOCK_MONOTONIC) > work.deadline_us) ||
        (mutant_now && all.violations))
        return 0;
    *first = work.next;
    *n = BATCH - work.next % BATCH;
    if (*n > work.end - work.next)
        *n = work.end - work.next;
    work.next += *n;
    return 1;
}

static int next_sweep(uint64_t *configuration, uint64_t *from_nothing)
{
    if (work.next >= work.end)
        return 0;
    *configuration = 1000 + work.next / 2;
    *from_nothing = work.next % 2;
    work.next++;
    return 1;
}

static void tell(const char *what, double seconds)
{
    double cpu = (double)all.cpu_us * 1e-6;
    (void)printf("%s: %llu schedules, %llu done, %llu kills, %llu power cuts, %llu stops, "
                 "%llu requests to stop, %llu I/O operations\n",
                 what, (unsigned long long)all.schedules, (unsigned long long)all.done,
                 (unsigned long long)all.kills, (unsigned long long)all.power_cuts,
                 (unsigned long long)all.stops, (unsigned long long)all.requests,
                 (unsigned long long)all.operations);
    (void)printf("  faults:");
    for (int f = 1; f < DISK_FAULT_COUNT; f++)
        (void)printf(" %s %llu", disk_fault_names[f], (unsigned long long)all.faults[f]);
    (void)printf("\n  recoveries: launcher %llu, T1 %llu, T2 %llu, T3 %llu, T4 %llu\n",
                 (unsigned long long)all.recoveries[0], (unsigned long long)all.recoveries[1],
                 (unsigned long long)all.recoveries[2], (unsigned long long)all.recoveries[3],
                 (unsigned long long)all.recoveries[4]);
    (void)printf(
        "  %.1f s, %.0f schedules per second of a core, %.0f ticks each; %llu violations\n",
        seconds, cpu > 0.0 ? (double)all.schedules / cpu : 0.0,
        all.schedules ? (double)all.ticks / (double)all.schedules : 0.0,
        (unsigned long long)all.violations);
}

static void tell_json(FILE *out, const char *commit, uint64_t first, double seconds)
{
    double cpu = (double)all.cpu_us * 1e-6;
    (void)fprintf(out,
                  "{\"name\": \"sim\", \"commit\": \"%s\", \"schedules\": %llu, \"kills\": %llu, "
                  "\"power_cuts\": %llu, \"stops\": %llu, \"faults\": {",
                  commit, (unsigned long long)all.schedules, (unsigned long long)all.kills,
                  (unsigned long long)all.power_cuts, (unsigned long long)all.stops);
    for (int f = 1; f < DISK_FAULT_COUNT; f++)
        (void)fprintf(out, "%s\"%s\": %llu", f > 1 ? ", " : "", disk_fault_names[f],
                      (unsigned long long)all.faults[f]);
    (void)fprintf(out,
                  "}, \"recoveries\": {\"launcher\": %llu, \"T1\": %llu, \"T2\": %llu, "
                  "\"T3\": %llu, \"T4\": %llu}, \"violations\": %llu, \"seconds\": %.0f, "
                  "\"schedules_per_core_second\": %.0f, \"first_seed\": %llu}\n",
                  (unsigned long long)all.recoveries[0], (unsigned long long)all.recoveries[1],
                  (unsigned long long)all.recoveries[2], (unsigned long long)all.recoveries[3],
                  (unsigned long long)all.recoveries[4], (unsigned long long)all.violations,
                  seconds, cpu > 0.0 ? (double)all.schedules / cpu : 0.0,
                  (unsigned long long)first);
}

struct arguments {
    uint64_t schedules, first, seed, soak;
    int jobs, sweep, mutants, has_seed, has_first;
    const char *commit, *ledger;
};

static int one(const struct arguments *a)
{
    struct sim_result result;
    if (prepare(a->seed / BATCH) < 0) {
        (void)printf("undisturbed run: %s\n", sim.violation);
        return 1;
    }
    sim_run_random(a->seed, &result);
    (void)printf("seed %llu: %s\n", (unsigned long long)a->seed,
                 result.violation ? result.violation
                 : result.done    ? "done"
                                  : "stopped for a cause");
    return result.violation != NULL;
}

static int many(const struct arguments *a, const char *what)
{
    uint64_t start = now_us(CLOCK_MONOTONIC);
    run_batches(a->jobs, a->sweep ? run_sweep : run_seeds, a->sweep ? next_sweep : next_seeds);
    double seconds = (double)(now_us(CLOCK_MONOTONIC) - start) * 1e-6;
    tell(what, seconds);
    if (a->soak) {
        FILE *ledger = a->ledger ? fopen(a->ledger, "ae") : stdout;
        if (!ledger) {
            perror(a->ledger);
            return 1;
        }
        tell_json(ledger, a->commit, a->first, seconds);
        if (a->ledger)
            (void)fclose(ledger);
    }
    return all.violations != 0;
}

static int schedules(const struct arguments *a)
{
    work.next = a->first;
    work.end = a->soak ? UINT64_MAX : a->first + a->schedules;
    work.deadline_us = a->soak ? now_us(CLOCK_MONOTONIC) + a->soak * 1000000u : 0;
    int bad = many(a, "schedules");
    (void)printf("%s schedules from seed %llu on\n", bad ? "not ok" : "ok",
                 (unsigned long long)a->first);
    return bad;
}

static int sweep(const struct arguments *a)
{
    work.next = 0;
    work.end = 2 * SWEEP_CONFIGURATIONS;
    int bad = many(a, "sweep");
    (void)printf("%s every I/O of a short run x every fault, alone and with a second one\n",
                 bad ? "not ok" : "ok");
    return bad;
}

static int all_mutants(const struct arguments *a)
{
    int survivors = 0;
    for (int m = 1; m < MUTANT_COUNT; m++) {
        memset(&all, 0, sizeof all);
        mutant_now = (enum mutant)m;
        work.next = a->first;
        work.end = a->first + MUTANT_SCHEDULES_MAX;
        run_batches(a->jobs, run_seeds, next_seeds);
        if (all.violations)
            (void)printf("ok mutant %s (%s): seen after %llu schedules: %.140s\n", mutants[m].name,
                         mutants[m].sentence, (unsigned long long)all.schedules, all.bad_text);
        else
            (void)printf("not ok mutant %s (%s): not seen in %llu schedules\n", mutants[m].name,
                         mutants[m].sentence, (unsigned long long)all.schedules);
        (void)fflush(stdout);
        survivors += all.violations == 0;
    }
    return survivors != 0;
}

static enum mutant mutant_named(const char *name)
{
    for (int m = 0; m < MUTANT_COUNT; m++)
        if (strcmp(mutants[m].name, name) == 0)
            return (enum mutant)m;
    (void)fprintf(stderr, "sim: no mutant \"%s\"\n", name);
    exit(2);
}

static void parse(struct arguments *a, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--trace") == 0) {
            sim.trace = 1;
            continue;
        }
        if (strcmp(argv[i], "--sweep") == 0 || strcmp(argv[i], "--mutants") == 0) {
            a->sweep |= argv[i][2] == 's';
            a->mutants |= argv[i][2] == 'm';
            continue;
        }
        i++;
        if (strcmp(argv[i - 1], "--schedules") == 0) {
            a->schedules = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i - 1], "--first") == 0) {
            a->first = strtoull(value, NULL, 10);
            a->has_first = 1;
        } else if (strcmp(argv[i - 1], "--seed") == 0) {
            a->seed = strtoull(value, NULL, 10);
            a->has_seed = 1;
        } else if (strcmp(argv[i - 1], "--soak") == 0) {
            a->soak = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i - 1], "--jobs") == 0) {
            a->jobs = atoi(value);
        } else if (strcmp(argv[i - 1], "--commit") == 0) {
            a->commit = value;
        } else if (strcmp(argv[i - 1], "--ledger") == 0) {
            a->ledger = value;
        } else if (strcmp(argv[i - 1], "--mutant") == 0) {
            mutant_now = mutant_named(value);
        } else {
            (void)fprintf(stderr, "sim: unknown option %s\n", argv[i - 1]);
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    struct arguments a = {
        .schedules = 1000, .jobs = (int)sysconf(_SC_NPROCESSORS_ONLN), .commit = ""};
    parse(&a, argc, argv);
    if (a.jobs < 1 || a.jobs > JOBS_MAX)
        a.jobs = a.jobs < 1 ? 1 : JOBS_MAX;
    if (a.soak && !a.has_first) /* fresh ones each time */
        a.first = (uint64_t)time(NULL) * 100000 / BATCH * BATCH;
    shared = mmap(NULL, JOBS_MAX * sizeof *shared, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("sim: mmap");
        return 1;
    }
    sim_core_open();
    sim_disk_open();
    if (a.has_seed)
        return one(&a);
    if (a.mutants)
        return all_mutants(&a);
    return a.sweep ? sweep(&a) : schedules(&a);
}
