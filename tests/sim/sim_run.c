/*
 * One schedule: what happens to the run, and the oracle.
 *
 * The oracle. At every commit that io_worker announces, and at every resume, the state hash is that
 * of the undisturbed run at that step. No announced commit is lost, except that a write which the
 * disk lost, misplaced or let rot may cost one. Every export and every evaluation is that of the
 * undisturbed run. At the end every step has one line in metrics.jsonl. The run ends, within a
 * bounded number of ticks, done, or with a stop that the injected faults account for; and after
 * such a stop, with the faults gone, a new start completes it.
 */
#include "tests/sim/sim.h"

#include "launcher/coordinator.h"
#include "launcher/metrics.h"
#include "launcher/run_dir.h"
#include "launcher/step_line.h"
#include "launcher/supervisor.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS_MAX = 24, TICKS_MAX = 400000, LAUNCHERS_MAX = 24, STATUS_KILLED = -1 };

enum event_kind {
    EVENT_KILL,
    EVENT_KILL_LAUNCHER,
    EVENT_STOP,
    EVENT_POWER,
    EVENT_SECOND_LAUNCHER,
    EVENT_SCRIBBLE, /* a bit flips in a descriptor; or a dying io_worker flips one of its own */
    EVENT_REQUEST,  /* `mtlaunch stop`, or somebody who may not ask for it */
    EVENT_SIGNAL,   /* SIGTERM to the launcher */
    EVENT_REFUSE,   /* the system gives the launcher no process, memory, directory */
    EVENT_EXPORT,   /* an export cannot be written */
    EVENT_FULL,     /* metrics.jsonl has no room for a while */
    EVENT_STUCK,    /* a worker stands still, and no signal ends it */
    EVENT_FLIP,     /* the device computes wrongly, so that it shows; training.spike = "redo" */
};

struct event {
    uint64_t at; /* yields */
    enum event_kind kind;
};

struct golden golden;

/* The schedule under way. */
static struct {
    int is_golden, is_random, snapshot;
    struct event events[EVENTS_MAX];
    unsigned n_events, echoes; /* echoes: faults that follow faults, still to be drawn */
    int launcher, status;      /* pid; how the newest one ended */
    uint64_t committed;        /* newest commit known */
    int any_commit;
    int corrupted_seen;     /* of disk.corrupted, what a step back has been granted for */
    unsigned deaths;        /* injected since the newest commit, */
    unsigned deaths_before; /* and between it and the one before: the launcher may be behind */
    unsigned disturbances;  /* of any kind */
    unsigned scribbles;     /* bits flipped in shared memory */
    int healed;             /* a stop was reached: the rest runs without faults */
    int second;             /* pid of a second launcher on the same run; 0 none */
    int using;              /* pid of the launcher that opened the newest session */
    int resumed;            /* that one's pid, too, once it has found */
    uint64_t at_start;      /* this commit */
    uint64_t session_start; /* and the newest session; nothing waits for room as it begins */
    uint64_t stop_after, stop_step; /* where it was told to stop: by its configuration (0: not), */
    int asked;                      /* by somebody who may, */
    int full_long;                  /* longer than the launcher waits for room */
    int stopping, signalled;        /* by a request that this pid answered; by a signal, this pid */
    enum sim_refusal refusal;       /* the next one */
    unsigned exports_fail, flips;   /* of the next ones */
    uint64_t flipped;               /* so many computations came out wrong */
    unsigned refused, stuck, export_lost; /* what accounts for a stop */
    struct sim_result *result;
} run;

/* -- what the product tells -- */

static void check_state(const char *what, uint64_t step, const uint8_t hash[16])
{
    char found[33], expected[33];
    if (step > config.steps) {
        sim_violation("%s: step %llu of %llu", what, (unsigned long long)step,
                      (unsigned long long)config.steps);
        return;
    }
    if (run.is_golden && !golden.has_state[step]) {
        memcpy(golden.state[step], hash, 16);
        golden.has_state[step] = 1;
        return;
    }
    if (memcmp(golden.state[step], hash, 16) == 0)
        return;
    step_line_hash(expected, golden.state[step]);
    step_line_hash(found, hash);
    sim_violation("%s of step %llu: state %s, undisturbed %s", what, (unsigned long long)step,
                  found, expected);
}

static void forget_deaths(void)
{
    run.deaths_before = run.deaths;
    run.deaths = 0;
}

void sim_on_commit(const struct worker_control *io)
{
    uint64_t step = io->committed_step, complete = io->complete_step;
    check_state("complete step", complete, io->state_hash[complete % PLAN_SLACK_STEPS]);
    if (run.any_commit && step <= run.committed)
        return;
    sim_trace("commit of step %llu", (unsigned long long)step);
    check_state("commit", step, io->state_hash[step % PLAN_SLACK_STEPS]);
    if (run.any_commit && step > run.committed + config.durability)
        sim_violation("commit of step %llu after step %llu", (unsigned long long)step,
                      (unsigned long long)run.committed);
    run.any_commit = 1;
    run.committed = step;
    forget_deaths();
}

void sim_on_announced(uint64_t step)
{
    if (step <= run.committed)
        return;
    run.committed = step;
    forget_deaths();
}

/* io_worker is READY: in a new session, or (alone) in a restart of one worker. */
void sim_on_resume(const struct worker_control *io, int alone)
{
    uint64_t step = io->committed_step, complete = io->resume_step;
    sim_trace("io is ready, newest commit: step %llu, complete: step %llu",
              (unsigned long long)step, (unsigned long long)complete);
    check_state("resume", step, io->state_hash[step % PLAN_SLACK_STEPS]);
    check_state("resume at the complete step", complete,
                io->state_hash[complete % PLAN_SLACK_STEPS]);
    if (complete < step || (!alone && complete != step))
        sim_violation("resume at step %llu with a commit of step %llu",
                      (unsigned long long)complete, (unsigned long long)step);
    run.result->recoveries[1] += (uint64_t)alone;
    if (!alone)
        run.session_start = step;
    if (run.resumed != run.using)
        run.at_start = step;
    run.resumed = run.using;
    if (run.snapshot) {
        sim_disk_keep();
        run.snapshot = 0;
    }
    if (run.any_commit && step < run.committed) {
        /* a commit that was given up may look whole again until the redo's flush; and if that
         * fails... */
        int damage = disk.corrupted ? disk.corrupted + (int)disk.done[DISK_FLUSH_FAILS] : 0;
        if (damage <= run.corrupted_seen || run.committed - step > config.durability)
            sim_violation("resume at step %llu, though step %llu was committed",
                          (unsigned long long)step, (unsigned long long)run.committed);
        run.corrupted_seen = damage;
        run.result->recoveries[3]++;
    }
    if (step > run.committed)
        forget_deaths();
    run.any_commit = 1;
    run.committed = step;
}

void sim_on_export(uint64_t step, uint64_t hash)
{
    if (step > config.steps)
        return;
    if (run.is_golden && !golden.exported[step])
        golden.exported[step] = hash;
    if (golden.exported[step] != hash)
        sim_violation("export of step %llu differs from the undisturbed run's",
                      (unsigned long long)step);
}

void sim_on_session(void)
{
    int pid = sim_self()->pid;
    if (pid != run.using && sim_find(run.using))
        sim_violation("two launchers at once on one run: pid %d and pid %d", run.using, pid);
    run.using = pid;
    if (run.result->sessions++ > 0 && sim_self()->index == 0)
        run.result->recoveries[2]++;
}

/* -- what the product asks of a world that does not give it -- */

int sim_refuses(enum sim_refusal what)
{
    if (run.refusal != what)
        return 0;
    sim_trace("refused: %d", (int)what);
    run.refusal = REFUSE_NOTHING;
    run.refused++;
    return 1;
}

/* Only the last one is what the run was for. */
int sim_export_fails(uint64_t step)
{
    if (run.exports_fail == 0)
        return 0;
    run.exports_fail--;
    run.export_lost += step == config.steps;
    return 1;
}

/* A wrong gradient is noticed where enough steps were applied before it. */
uint64_t sim_flip(uint64_t step)
{
    uint64_t applied = 0;
    for (uint64_t s = 1; s < step; s++)
        applied += !(config.skip_mask >> s & 1);
    if (run.flips == 0 || config.spike != CONFIG_SPIKE_REDO || applied < SPIKE_STEPS_MIN)
        return 0;
    run.flips--;
    sim_trace("the gradient of step %llu comes out wrong", (unsigned long long)step);
    return ++run.flipped;
}

/* It is answered once and for all. */
void sim_on_stopping(uint64_t step)
{
    int pid = sim_self()->pid;
    if (!run.asked)
        sim_violation("a stranger's request to stop is obeyed");
    if (run.stopping == pid && run.stop_step != step)
        sim_violation("a stop after step %llu, now after step %llu",
                      (unsigned long long)run.stop_step, (unsigned long long)step);
    run.stopping = pid;
    run.stop_step = step;
    sim_trace("answer: the run stops after step %llu", (unsigned long long)step);
}

/* -- the launcher -- */

static void tell_end(struct launcher *l)
{
    l->finished = coordinator_committed(l) >= l->coordinator.steps;
}

static int launch(struct launcher *l)
{
    struct supervisor_job job = {.request = {.mode = PLAN_TRAIN},
                                 .begin = coordinator_begin,
                                 .turn = coordinator_turn,
                                 .rejoin = coordinator_rejoin,
                                 .done = tell_end};
    sim_stand_launcher(l);
    if (sim_self()->index == 0)
        l->config.run_stop_after_step = run.stop_after;
    int rc = run_dir_open(&l->run, "/run", RUN_DIR_CREATE);
    if (rc == 0)
        rc = run_dir_lock_stores(&l->run, &l->config, RUN_DIR_CREATE);
    if (rc == 0)
        rc = supervisor_run(l, &job);
    coordinator_end(l);
    metrics_close(l->metrics);
    if (rc < 0)
        sim_trace("launcher: %s", error_text());
    run_dir_close(&l->run);
    return rc == 0 && !l->finished ? -ERROR_STOPPED : rc;
}

static int launcher_entry(struct sim_process *p)
{
    struct launcher l;
    int status = -launch(&l);
    if (p->pid == run.launcher)
        run.status = status;
    return status;
}

static void start_launcher(void)
{
    run.status = STATUS_KILLED;
    run.stop_after =
        run.is_random && !run.healed && sim_chance(12) ? 1 + sim_below(config.steps) : 0;
    run.launcher = sim_spawn(ROLE_LAUNCHER, 0, launcher_entry)->pid;
    run.result->launchers++;
}

/* -- what happens to it -- */

static struct sim_process *random_worker(void)
{
    struct sim_process *able[SIM_PROCESSES_MAX] = {NULL};
    uint64_t n = 0;
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        struct sim_process *p = &sim.processes[i];
        if (p->role != ROLE_LAUNCHER && !sim_is_stuck(p) &&
            (p->state == SIM_RUNNABLE || p->state == SIM_SLEEPING))
            able[n++] = p;
    }
    return n ? able[sim_below(n)] : NULL;
}

static void cut_power(void)
{
    sim_trace("power cut");
    for (int i = 0; i < SIM_PROCESSES_MAX; i++) {
        struct sim_process *p = &sim.processes[i];
        if (p->state == SIM_FREE)
            continue;
        sim_process_gone(p);
        sim_ipc_gone(i);
        p->state = SIM_FREE;
    }
    sim.n_live = 0;
    sim.deaths++;
    sim_disk_power_cut();
    sim_ipc_reset();
    run.result->power_cuts++;
    run.disturbances++;
    run.second = 0;
    if (run.status == ERROR_BUSY)
        run.status = STATUS_KILLED; /* who held the run then is gone, too */
}

static void stop_for_a_while(struct sim_process *p)
{
    static const uint64_t seconds[] = {0, 1, 5,
                                       70}; /* the last one is beyond the watchdog's floors */
    uint64_t s = sim_chance(64) ? 650 : seconds[sim_below(4)];
    p->stopped_until_ns = sim.now_ns + s * 1000000000u + sim_below(50000000);
    sim_trace("stop of %s.%u for %llu s", topology_role_name(p->role), p->index,
              (unsigned long long)s);
    run.result->stops++;
    run.disturbances++;
    run.deaths++; /* the watchdog may end it */
}

static void scribble(void)
{
    struct sim_process *io = NULL, *opt = NULL;
    for (int i = 0; i < sim.n_live; i++) {
        struct sim_process *p = &sim.processes[sim.live[i]];
        io = p->role == ROLE_IO ? p : io;
        opt = p->role == ROLE_OPT ? p : opt;
    }
    run.deaths++;
    run.disturbances++;
    run.scribbles++;
    if (sim_chance(4) || !io) {
        (void)sim_scribble_ring();
    } else if (opt && sim_chance(4)) {
        sim_kill(opt, SIGSEGV);
        (void)sim_scribble_of_opt(opt->index);
    } else {
        sim_kill(io, SIGSEGV);
        (void)sim_scribble_of_io();
    }
}

/* Half of them come from somebody whom the launcher must not obey. */
static void request_stop(void)
{
    const struct plan *plan = sim_newest_plan();
    struct message m = {.type = MESSAGE_STOP};
    const char *from = "command.1";
    if (!plan)
        return;
    memcpy(m.token, plan->token, sizeof m.token);
    m.generation = plan->generation;
    switch (sim_below(6)) {
    case 0:
        m.token[0] ^= 1;
        break;
    case 1:
        from = "io.0.1";
        break;
    case 2:
        m.type = MESSAGE_DOORBELL;
        break;
    default:
        run.asked = 1;
        break;
    }
    sim_ipc_post(from, &m);
}

static void get_stuck(struct sim_process *p)
{
    p->stuck_until_ns = sim.now_ns + (sim_chance(2) ? 20u : 500u) * UINT64_C(1000000000);
    p->stopped_until_ns = p->stuck_until_ns;
    sim_trace("%s.%u is stuck", topology_role_name(p->role), p->index);
    run.stuck++;
    run.deaths++; /* the watchdog may end it */
    run.disturbances++;
}

static void happen_to_launcher(const struct event *e, struct sim_process *launcher)
{
    run.disturbances++;
    if (e->kind == EVENT_REQUEST) {
        request_stop();
    } else if (e->kind == EVENT_SIGNAL && launcher) {
        launcher->signalled = 1;
        launcher->wake_ns = sim.now_ns;
        run.signalled = launcher->pid;
    } else if (e->kind == EVENT_REFUSE) {
        run.refusal = (enum sim_refusal)(1 + sim_below(REFUSALS - 1));
    } else if (e->kind == EVENT_EXPORT) {
        run.exports_fail = 1 + (unsigned)sim_below(2);
    } else if (e->kind == EVENT_FULL) {
        static const uint64_t seconds[] = {1, 5, 30};
        uint64_t s = seconds[sim_below(3)];
        disk.full_until_ns = sim.now_ns + s * UINT64_C(1000000000);
        run.full_long |= s >= METRICS_FULL_S;
    } else if (e->kind == EVENT_FLIP) {
        run.flips = sim_chance(4) ? 8 : 1 + (unsigned)sim_below(2);
    }
}

static void echo(void)
{
    if (run.echoes == 0 || run.n_events == EVENTS_MAX)
        return;
    run.echoes--;
    run.events[run.n_events++] =
        (struct event){sim.yields + sim_below(600), (enum event_kind)sim_below(4)};
    sim.attention = 0; /* to be looked at */
}

static void happen(const struct event *e)
{
    struct sim_process *launcher = sim_find(run.launcher), *worker = random_worker();
    switch (e->kind) {
    case EVENT_KILL:
        if (worker) {
            run.result->kills++;
            run.deaths++;
            run.disturbances++;
            sim_kill(worker, sim_chance(4) ? SIGSEGV : sim_chance(8) ? 0 : SIGKILL);
        }
        break;
    case EVENT_KILL_LAUNCHER:
        if (launcher) {
            run.result->kills++;
            run.disturbances++;
            sim_kill(launcher, SIGKILL);
        }
        break;
    case EVENT_STOP:
        if (worker)
            stop_for_a_while(worker);
        break;
    case EVENT_POWER:
        disk.cut = 1;
        break;
    case EVENT_SCRIBBLE:
        scribble();
        break;
    case EVENT_SECOND_LAUNCHER:
        if (launcher && !sim_find(run.second)) {
            run.second = sim_spawn(ROLE_LAUNCHER, 1, launcher_entry)->pid;
        }
        break;
    case EVENT_STUCK:
        if (worker)
            get_stuck(worker);
        break;
    default:
        happen_to_launcher(e, launcher);
    }
    echo();
}

static void take_events(void)
{
    sim.attention = UINT64_MAX;
    if (run.n_events == 0)
        return;
    for (unsigned i = 0; i < run.n_events;) {
        if (run.events[i].at <= sim.yields) {
            struct event e = run.events[i];
            run.events[i] = run.events[--run.n_events];
            happen(&e);
        } else {
            if (run.events[i].at < sim.attention)
                sim.attention = run.events[i].at;
            i++;
        }
    }
}

static uint64_t disk_faults(void)
{
    uint64_t n = 0;
    for (int f = 0; f < DISK_CUT_BEFORE; f++)
        n += disk.done[f];
    return n;
}

/* A worker's death alone must not look like damage to those who live: that would cost a restart of
 * all. */
void sim_on_damage(const struct sim_process *p)
{
    if (disk_faults() == 0 && run.scribbles == 0 && !strstr(p->error, "was flushing step"))
        sim_violation("%s.%u found damage that nobody did: %s", topology_role_name(p->role),
                      p->index, p->error);
}

/* -- the end -- */

/* {"event": "eval", ..., "step": 2, "val_loss": 0.348617315, ...} */
static void check_evaluation(const char *line)
{
    unsigned long long step;
    char loss[32];
    const char *at =
        strncmp(line, "{\"event\": \"eval\"", 16) == 0 ? strstr(line, "\"step\"") : NULL;
    if (!at || sscanf(at, "\"step\": %llu, \"val_loss\": %31[^,]", &step, loss) != 2 ||
        step > config.steps)
        return;
    char *expected = golden.evaluated[step];
    if (run.is_golden)
        memcpy(expected, loss, sizeof loss);
    else if (strcmp(expected, loss) != 0)
        sim_violation("evaluation of step %llu: loss %s, undisturbed %s", step, loss, expected);
}

static void check_metrics(void)
{
    uint64_t n, seen[SIM_STEPS_MAX + 2] = {0};
    const char *text = (const char *)sim_disk_bytes("/run/metrics.jsonl", &n);
    char hash[33];
    if (!text) {
        sim_violation("done without metrics.jsonl");
        return;
    }
    for (const char *line = text, *end = text + n; line < end;) {
        const char *next = memchr(line, '\n', (size_t)(end - line));
        unsigned long long step;
        char found[40] = "";
        if (!next)
            break;
        if (sscanf(line, "{\"step\": %llu, \"state_hash\": \"%32s\"}", &step, found) >= 1 &&
            step >= 1 && step <= config.steps) {
            step_line_hash(hash, golden.state[step]);
            seen[step]++;
            if (strncmp(found, hash, 32) != 0)
                sim_violation("metrics.jsonl: the line of step %llu has another hash", step);
        }
        check_evaluation(line);
        line = next + 1;
    }
    for (uint64_t s = 1; s <= config.steps; s++)
        if (seen[s] != 1)
            sim_violation("metrics.jsonl: %llu lines of step %llu", (unsigned long long)seen[s],
                          (unsigned long long)s);
}

static void check_done(void)
{
    char path[64];
    if (run.committed != config.steps)
        sim_violation("done after step %llu of %llu", (unsigned long long)run.committed,
                      (unsigned long long)config.steps);
    (void)snprintf(path, sizeof path, "/run/export/step-%llu", (unsigned long long)config.steps);
    if (!sim_disk_exists(path))
        sim_violation("done without an export");
    check_metrics();
    run.result->done = 1;
    sim.over = 1;
}

/* Of all faults of the disk only one lost write, with three slots, after the import: what the
 * design answers by going one commit back, without a stop. */
static int only_one_lost(void)
{
    return disk_faults() == 1 && disk.done[DISK_LOST] == 1 && config.slots == 3 &&
           run.committed > 0;
}

/* The last step of this start. */
static uint64_t asked_for(void)
{
    uint64_t last = run.stop_after ? run.stop_after : config.steps;
    return run.stopping == run.launcher && run.stop_step < last ? run.stop_step : last;
}

/* It was asked to stop: has it, where it was asked to? A new start goes on. */
static int stopped_as_asked(int status)
{
    uint64_t last = asked_for();
    if (status != ERROR_STOPPED)
        return 0;
    run.result->requests++;
    sim_trace("the launcher has stopped after the commit of step %llu",
              (unsigned long long)run.committed);
    if (run.signalled == run.launcher)
        return 1;
    if (last >= config.steps)
        sim_violation("the run stopped though nobody asked for it");
    if (run.committed != last && (run.committed < last || run.committed > run.at_start))
        sim_violation("the run stopped after step %llu, asked to after step %llu",
                      (unsigned long long)run.committed, (unsigned long long)last);
    return 1;
}

static int has_other_cause(void)
{
    return run.refused || run.stuck || run.export_lost ||
           (disk.full && (run.full_long || run.committed == run.session_start)) ||
           run.flipped + 1 >= SPIKE_COMPUTATIONS_MAX;
}

static void heal(void)
{
    run.healed = 1;
    run.n_events = 0;
    run.echoes = 0;
    run.deaths = 3;
    run.refusal = REFUSE_NOTHING;
    run.exports_fail = run.flips = 0;
    for (int i = 0; i < SIM_PROCESSES_MAX; i++)
        sim.processes[i].stuck_until_ns = sim.processes[i].stopped_until_ns = 0;
    sim_disk_heal();
}

/* A stop (T4): is there a cause, and does a new start go on when the cause is gone? */
static void stopped(int status)
{
    uint64_t deaths =
        run.deaths + run.deaths_before + disk.done[DISK_KILL_BEFORE] + disk.done[DISK_KILL_AFTER];
    run.result->recoveries[4]++;
    sim_trace("the launcher ended with status %d", status);
    if ((disk_faults() == 0 || only_one_lost()) && deaths < 3 && !has_other_cause())
        sim_violation("the run stopped with status %d without a cause", status);
    if (run.healed) {
        if (disk.corrupted == 0 || only_one_lost())
            sim_violation("the run did not go on after a stop (status %d)", status);
        sim.over = 1; /* damaged beyond what the design promises to repair; and said so */
        return;
    }
    heal();
    start_launcher();
}

static void on_launcher_end(void)
{
    if (run.status == ERROR_BUSY && sim_find(run.second)) {
        run.launcher = run.second; /* it was there first, after the one before died */
        run.second = 0;
        run.stop_after = 0;
        run.status = STATUS_KILLED;
    } else if (run.status == 0) {
        if (asked_for() < config.steps && run.at_start < config.steps)
            sim_violation("asked to stop after step %llu, the run went on to its end",
                          (unsigned long long)asked_for());
        check_done();
    } else if (stopped_as_asked(run.status)) {
        start_launcher();
    } else if (run.status == STATUS_KILLED || (run.status == ERROR_BUSY && run.second)) {
        if (run.status == ERROR_BUSY)
            run.second = 0; /* whoever held the run is gone, too */
        run.result->recoveries[0]++;
        start_launcher();
    } else {
        stopped(run.status);
    }
    if (run.result->launchers > LAUNCHERS_MAX)
        sim_violation("%d launchers and no end", LAUNCHERS_MAX);
}

static void run_to_the_end(void)
{
    uint64_t deaths = sim.deaths;
    start_launcher();
    while (!sim.over) {
        if (disk.cut) {
            cut_power();
            echo();
        }
        if (sim.yields >= sim.attention || sim.tick == 0)
            take_events();
        if (deaths != sim.deaths) {
            deaths = sim.deaths;
            if (!sim_find(run.launcher))
                on_launcher_end();
        } else if (!sim_tick()) {
            sim_violation("nothing can happen any more");
        }
        if (sim.tick > TICKS_MAX)
            sim_violation("no end after %d ticks", TICKS_MAX);
    }
    run.result->ticks = sim.tick;
    run.result->operations = disk.operations;
    run.result->violation = sim.violation;
    for (int f = 0; f < DISK_FAULT_COUNT; f++)
        run.result->faults[f] = disk.done[f];
}

static void reset(uint64_t seed, struct sim_result *result)
{
    memset(&run, 0, sizeof run);
    memset(result, 0, sizeof *result);
    result->seed = seed;
    run.result = result;
    sim_core_reset(seed);
    sim_process_reset();
    sim_ipc_reset();
    sim_frames_reset();
}

int sim_run_golden(uint64_t seed)
{
    struct sim_result result;
    memset(&golden, 0, sizeof golden);
    sim_disk_format();
    reset(seed, &result);
    sim.stretch = 1;
    run.is_golden = run.snapshot = 1;
    run_to_the_end();
    golden.ticks = sim.tick;
    golden.yields = sim.yields;
    golden.operations = disk.operations;
    golden.transfers = disk.transfers;
    return sim.violation ? -1 : 0;
}

/* -- random schedules -- */

static void add_events(enum event_kind kind, uint64_t n)
{
    for (; n > 0 && run.n_events < EVENTS_MAX; n--)
        run.events[run.n_events++] =
            (struct event){sim_below(golden.yields + golden.yields / 4), kind};
}

static void add_disk_faults(uint64_t n)
{
    for (; n > 0 && disk.n_plans < DISK_PLANS_MAX; n--) {
        enum disk_fault fault = (enum disk_fault)(1 + sim_below(DISK_FAULT_COUNT - 1));
        disk.plans[disk.n_plans++] =
            (struct disk_plan){sim_below(golden.operations + golden.operations / 4), fault};
    }
}

static void draw_faults(void)
{
    uint64_t mix = sim_below(16);
    if (mix == 0)
        return; /* other interleavings alone */
    run.echoes = (unsigned)sim_below(3);
    if (mix & 1)
        add_events(EVENT_KILL, 1 + sim_below(2));
    if (mix & 2)
        add_events(EVENT_KILL_LAUNCHER, sim_below(2));
    if (mix & 4)
        add_events(EVENT_POWER, 1);
    if (mix & 8)
        add_disk_faults(1 + sim_below(2));
    if (sim_chance(8))
        add_events(EVENT_STOP, 1);
    if (sim_chance(12))
        add_events(EVENT_SECOND_LAUNCHER, 1);
    if (sim_chance(6))
        add_events(EVENT_SCRIBBLE, !config.no_watchdog); /* that it may make wait for ever */
    if (sim_chance(10))
        add_events(EVENT_REQUEST, 1 + sim_below(2));
    if (sim_chance(24))
        add_events(EVENT_SIGNAL, 1);
    if (sim_chance(12))
        add_events(EVENT_REFUSE, 1 + sim_below(2));
    if (sim_chance(16))
        add_events(EVENT_EXPORT, 1);
    if (sim_chance(16))
        add_events(EVENT_FULL, 1);
    if (sim_chance(40))
        add_events(EVENT_STUCK, 1);
    if (sim_chance(3))
        add_events(EVENT_FLIP, config.spike == CONFIG_SPIKE_REDO);
}

void sim_run_random(uint64_t seed, struct sim_result *result)
{
    reset(seed, result);
    run.is_random = 1;
    if (sim_chance(24))
        sim_disk_format();
    else
        sim_disk_restore();
    draw_faults();
    run_to_the_end();
}

void sim_run_planned(const struct disk_plan *plans, unsigned n, uint64_t seed, int from_nothing,
                     struct sim_result *result)
{
    reset(seed, result);
    if (from_nothing)
        sim_disk_format();
    else
        sim_disk_restore();
    memcpy(disk.plans, plans, n * sizeof *plans);
    disk.n_plans = n;
    run_to_the_end();
}
