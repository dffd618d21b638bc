#include "launcher/coordinator.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/norm_tree.h"
#include "ipc/page_image.h"
#include "ipc/worker.h"
#include "launcher/findings.h"
#include "launcher/metrics.h"
#include "launcher/progress.h"
#include "launcher/restart.h"
#include "launcher/samples.h"
#include "launcher/session.h"
#include "launcher/size.h"
#include "launcher/step_line.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/fault.h"
#include "procs/mutant.h"

/* A norm times the clipping factor above this would overflow the second moment in f32. */
#define UPDATE_NORM_MAX 1e18

static uint64_t fact(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_acquire);
}

static void order(struct launcher *l, _Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_release); /* what belongs to it is written */
    session_wake(l);
}

uint64_t coordinator_committed(const struct launcher *l)
{
    return l->coordinator.committed;
}

uint64_t coordinator_complete(const struct launcher *l)
{
    return l->coordinator.complete;
}

/* The last step of this start. */
static uint64_t last_step(const struct launcher *l)
{
    const struct coordinator *c = &l->coordinator;
    uint64_t last = c->steps;
    if (c->stop_after && c->stop_after < last)
        last = c->stop_after;
    if (!l->stop_requested)
        return last;
    uint64_t stop = c->begun > l->stop_step ? c->begun : l->stop_step;
    return stop < last ? stop : last;
}

static int evaluation_due(const struct launcher *l, uint64_t step)
{
    uint64_t interval = l->config.eval_interval;
    return interval && step && (step % interval == 0 || step == l->coordinator.steps) &&
           step > l->coordinator.evaluated;
}

static int export_due(const struct launcher *l, uint64_t step)
{
    uint64_t interval = l->config.checkpoint_export_interval;
    return step && (step == l->coordinator.steps || (interval && step % interval == 0));
}

/* Durability K commits every K steps, and wherever somebody outside sees the step. */
static int commit_due(const struct launcher *l, uint64_t step)
{
    return step % l->config.memory_durability == 0 || step >= last_step(l) ||
           evaluation_due(l, step) || export_due(l, step);
}

static int export_pending(const struct launcher *l)
{
    return l->coordinator.written < l->coordinator.exported;
}

/* -- begin -- */

static int export_exists(const struct launcher *l, uint64_t step)
{
    char path[LAUNCHER_PATH_BYTES + 64];
    (void)snprintf(path, sizeof path, "%s/export/step-%llu", l->run.path, (unsigned long long)step);
    return access(path, F_OK) == 0;
}

/* STEP_APPLY of the second step after an export waits for it, so only the one before last can be
 * cut off. */
static void tell_lost_export(const struct launcher *l, uint64_t resumed)
{
    uint64_t step = resumed - 1;
    if (resumed > 1 && export_due(l, step) && !export_exists(l, step))
        progress_warn(
            l->progress,
            "there is no export of step %llu, which was due: the run has gone on to step %llu",
            (unsigned long long)step, (unsigned long long)resumed);
}

static uint64_t run_length(const struct launcher *l)
{
    const struct config *c = &l->config;
    if (!(c->training_epochs > 0.0))
        return c->training_steps;
    double per_step =
        (double)c->training_micro_batch_size * (double)c->training_gradient_accumulation_steps;
    double steps = ceil(c->training_epochs * (double)l->session.io->samples / per_step);
    return steps < 1.0 ? 1 : (uint64_t)steps;
}

static void tell_resume(struct launcher *l, uint64_t step)
{
    const struct worker_control *io = l->session.io;
    char fields[256], hash[33];
    step_line_hash(hash, io->state_hash[step % PLAN_SLACK_STEPS]);
    (void)snprintf(fields, sizeof fields,
                   ", \"step\": %llu, \"data_position\": %llu, \"t\": %llu, \"state_hash\": \"%s\"",
                   (unsigned long long)step, (unsigned long long)io->resume_data_position,
                   (unsigned long long)io->resume_t, hash);
    if (step)
        metrics_event(l->metrics, "resume", fields);
    if (step)
        progress_say(l->progress, "resuming after step %llu, state %s", (unsigned long long)step,
                     hash);
    if (step && io->lineage[0] && strcmp(io->lineage, l->session.gpu->lineage) != 0)
        progress_warn(l->progress,
                      "a new lineage begins: from here on bits may differ from an undisturbed run\n"
                      "  was: %s\n  now: %s",
                      io->lineage, l->session.gpu->lineage);
}

static void tell_mode(struct launcher *l)
{
    static int told;
    uint32_t every = l->session.gpu->checkpoint_every;
    char mode[32];
    if (told++ || l->config.training_activation_checkpointing != CONFIG_AUTO)
        return;
    (void)snprintf(mode, sizeof mode, every > 1 ? "every-%u" : every ? "full" : "none", every);
    progress_say(l->progress, "activation checkpointing: %s", mode);
}

/* Where the step protocol goes on from: the newest complete step, which io_worker names. */
static int set_counters(struct launcher *l)
{
    struct coordinator *c = &l->coordinator;
    const struct worker_control *io = l->session.io;
    struct launcher_control *o = l->session.orders;
    c->begun = c->complete = io->resume_step;
    c->committed = fact(&io->committed_step);
    c->written = fact(&io->exported_step);
    c->t = io->resume_t;
    c->evaluating = 0;
    samples_drop(l);
    c->window.count = io->spike_count;
    if (c->window.count > SPIKE_WINDOW_STEPS)
        return error_set(ERROR_DAMAGED,
                         "io_worker says that %u losses are known, expected at most %d",
                         c->window.count, SPIKE_WINDOW_STEPS);
    memcpy(c->window.loss, io->spike_loss, sizeof c->window.loss);
    memcpy(c->window.norm, io->spike_norm, sizeof c->window.norm);
    /* relaxed: the release of the generation comes after */
    atomic_store_explicit(&o->begin_step, 0, memory_order_relaxed);
    atomic_store_explicit(&o->apply_step, io->resume_step, memory_order_relaxed);
    atomic_store_explicit(&o->evaluate_request, 0, memory_order_relaxed);
    atomic_store_explicit(&o->generate_request, 0, memory_order_relaxed);
    return 0;
}

int coordinator_rejoin(struct launcher *l)
{
    const struct coordinator *c = &l->coordinator;
    if (set_counters(l) < 0)
        return -(int)error_kind_now();
    /* the one fact that a successor of io_worker takes over as it is */
    int bad = c->written > fact(&l->session.orders->export_step) ||
              (c->exported > c->given_up && !export_pending(l) && !export_exists(l, c->exported));
    if (bad && !mutant(MUTANT_facts_of_the_dead))
        return error_set(ERROR_DAMAGED,
                         "io_worker said before it died that step %llu is exported; ordered was "
                         "step %llu, and it is not there",
                         (unsigned long long)c->written, (unsigned long long)c->exported);
    if (!l->restart.redo)
        progress_say(l->progress, "restarted; going on after step %llu",
                     (unsigned long long)c->complete);
    return 0;
}

int coordinator_begin(struct launcher *l)
{
    struct coordinator *c = &l->coordinator;
    uint64_t resumed = l->session.io->resume_step;
    char warning[256];
    coordinator_end(l);
    memset(c, 0, sizeof *c);
    if (set_counters(l) < 0)
        return -(int)error_kind_now();
    c->first = resumed + 1;
    c->announced = c->lined = resumed;
    c->read_base = fact(&l->session.io->bytes_read); /* of the start */
    c->written_base = fact(&l->session.io->bytes_written);
    c->steps = run_length(l);
    c->stop_after = l->config.run_stop_after_step;
    c->page_sums = calloc(l->layout.n_pages, sizeof *c->page_sums);
    c->layer_sums = calloc(l->layout.n_layers, sizeof *c->layer_sums);
    if (!c->page_sums || !c->layer_sums)
        return error_set(ERROR_FAILED, "out of memory");
    schedule_init(&c->schedule, &l->config, c->steps);
    if (l->generation == 1 && schedule_warning(&c->schedule, warning, sizeof warning))
        progress_warn(l->progress, "%s", warning);
    metrics_close(l->metrics);
    l->metrics = NULL;
    if (metrics_open(&l->metrics, l->run.path, resumed) < 0)
        return -(int)error_kind_now();
    c->evaluated = metrics_last_evaluation(l->metrics, l->config.eval_sample_prompts.count);
    tell_resume(l, resumed);
    tell_mode(l);
    tell_lost_export(l, resumed);
    atomic_store_explicit(&l->session.orders->commit_step, resumed, memory_order_release);
    c->step_begin_ns = clock_now_ns();
    if ((resumed >= c->steps || export_due(l, resumed)) && !export_exists(l, resumed)) {
        c->exported = resumed;
        order(l, &l->session.orders->export_step, resumed);
    }
    return 0;
}

void coordinator_end(struct launcher *l)
{
    samples_drop(l);
    free(l->coordinator.page_sums);
    free(l->coordinator.layer_sums);
    l->coordinator.page_sums = l->coordinator.layer_sums = NULL;
}

/* -- decide -- */

static int norms_ready(const struct launcher *l, uint64_t step)
{
    for (uint32_t i = 0; i < l->session.plan->opt_workers; i++)
        if (fact(&l->session.opt[i]->norm_step) < step)
            return 0;
    return 1;
}

/* The global gradient norm, reduced in the fixed order of ipc/norm_tree.h. */
static int gradient_norm(struct launcher *l, uint64_t step, double *norm)
{
    struct coordinator *c = &l->coordinator;
    uint32_t n = l->session.plan->opt_workers;
    for (uint64_t p = 0; p < l->layout.n_pages; p++) {
        const struct norm_entry *entries =
            segment_region(&l->session.segment, REGION_NORM, topology_page_owner(p, n));
        const struct norm_entry *e = &entries[topology_page_rank(p, n)];
        uint64_t found = atomic_load_explicit(&e->step, memory_order_acquire);
        if (found != step)
            return error_set(ERROR_DAMAGED, "norm of page %llu: expected step %llu, found %llu",
                             (unsigned long long)p, (unsigned long long)step,
                             (unsigned long long)found);
        c->page_sums[p] = e->sum_of_squares;
    }
    for (uint32_t i = 0; i < l->layout.n_layers; i++) {
        const struct model_layer *layer = &l->layout.layers[i];
        c->layer_sums[i] = norm_layer(c->page_sums + layer->first_page, layer->n_pages);
    }
    *norm = norm_global(c->layer_sums, l->layout.n_layers);
    return 0;
}

static void fill_orders(struct launcher *l, struct step_orders *o, uint64_t step, double norm)
{
    struct coordinator *c = &l->coordinator;
    const struct step_result *r = &l->session.gpu->results[step % PLAN_SLACK_STEPS];
    double scale = schedule_clip_scale(norm, l->config.training_max_grad_norm);
    memset(o, 0, sizeof *o);
    o->step = step;
    o->loss = r->loss_sum / (double)r->labelled;
    o->norm = norm;
    o->labelled = r->labelled;
    o->skip = !isfinite(norm) || norm * scale > UPDATE_NORM_MAX;
    o->commits = (uint32_t)commit_due(l, step);
    o->t = c->t + !o->skip;
    struct schedule_scalars s = schedule_adamw(&c->schedule, step, o->t ? o->t : 1);
    o->learning_rate = s.learning_rate;
    o->lr_decay = s.decay;
    o->step_size = s.step_size;
    o->inv_sqrt_bias2 = s.inv_sqrt_bias2;
    o->beta1 = s.beta1;
    o->one_minus_beta1 = s.one_minus_beta1;
    o->beta2 = s.beta2;
    o->one_minus_beta2 = s.one_minus_beta2;
    o->eps = s.eps;
    o->scale = (float)scale;
}

static void tell_skip(struct launcher *l, const struct step_orders *o)
{
    char fields[128];
    (void)snprintf(fields, sizeof fields, ", \"step\": %llu, \"grad_norm\": \"%g\"",
                   (unsigned long long)o->step, o->norm);
    metrics_event(l->metrics, "skip", fields);
    progress_warn(
        l->progress,
        "step %llu skipped: gradient norm %g cannot be used; weights and moments are unchanged",
        (unsigned long long)o->step, o->norm);
}

static int may_decide(const struct launcher *l, uint64_t step)
{
    const struct session *s = &l->session;
    uint64_t exported = l->coordinator.exported;
    uint64_t committed = l->coordinator.committed;
    if (fact(&s->orders->apply_step) >= step || fact(&s->gpu->backward_step) < step ||
        l->coordinator.lined + 1 < step || !norms_ready(l, step))
        return 0;
    if (!mutant(MUTANT_apply_before_commit) && (committed < fact(&s->orders->commit_step) ||
                                                (commit_due(l, step - 1) && committed + 1 < step)))
        return 0;
    return !(export_pending(l) && (step >= exported + 2 || export_due(l, step)));
}

/* The bits of the whole gradient, from the hashes that travelled with its pages. */
static enum spike_answer judge_again(struct launcher *l, uint64_t step)
{
    uint32_t n = l->session.plan->opt_workers;
    struct page_digest hash = {0, 0};
    for (uint64_t p = 0; p < l->layout.n_pages; p++) {
        const struct norm_entry *entries =
            segment_region(&l->session.segment, REGION_NORM, topology_page_owner(p, n));
        uint64_t chain[3] = {hash.low, hash.high, entries[topology_page_rank(p, n)].gradient_hash};
        hash = page_image_digest(chain, sizeof chain);
    }
    return spike_judge(&l->coordinator.redo, step, hash.low, hash.high);
}

static void tell_spike(struct launcher *l, const struct step_orders *o, const char *answer)
{
    char fields[256];
    (void)snprintf(fields, sizeof fields,
                   ", \"step\": %llu, \"loss\": %.9g, \"grad_norm\": %.9g, \"answer\": \"%s\"",
                   (unsigned long long)o->step, o->loss, o->norm, answer);
    metrics_event(l->metrics, "spike", fields);
    progress_warn(l->progress, "step %llu: loss %g, gradient norm %g: a spike; %s",
                  (unsigned long long)o->step, o->loss, o->norm, answer);
}

/* training.spike: 1 the step may be applied (or, by policy, skipped); 0 it is computed once more;
 * negative. */
static int weigh_spike(struct launcher *l, struct step_orders *o)
{
    enum config_training_spike policy = l->config.training_spike;
    const struct coordinator *c = &l->coordinator;
    if (policy == CONFIG_SPIKE_OFF || o->skip ||
        !spike_found(&c->window, o->loss, o->norm, l->config.training_spike_factor))
        return 1;
    if (policy == CONFIG_SPIKE_SKIP) {
        o->skip = 1;
        o->t = c->t;
        tell_spike(l, o, "skipped");
        return 1;
    }
    switch (judge_again(l, o->step)) {
    case SPIKE_AGAIN:
        if (mutant(MUTANT_spike_applied_at_once))
            return 1;
        tell_spike(l, o, "computing it again");
        l->restart.redo = 1;
        restart_begin(l);
        return 0;
    case SPIKE_DATA:
        tell_spike(l, o, "the same bits again, so it is in the data; applied");
        return 1;
    case SPIKE_HARDWARE:
        tell_spike(l, o,
                   "other bits, then twice the same: hardware failed in one of them (memory or "
                   "processor: test both); applied");
        return 1;
    case SPIKE_LOST:
        break;
    }
    (void)error_set(ERROR_FAILED,
                    "step %llu was computed %d times and no two gradients were alike: this machine "
                    "does not compute reliably",
                    (unsigned long long)o->step, SPIKE_COMPUTATIONS_MAX);
    return error_hint("test memory and processor; the run's state of step %llu is intact",
                      (unsigned long long)coordinator_committed(l));
}

static int decide(struct launcher *l)
{
    struct launcher_control *orders = l->session.orders;
    uint64_t step = l->coordinator.begun;
    if (!may_decide(l, step))
        return 0;
    struct step_orders *o = &orders->orders[step % PLAN_SLACK_STEPS];
    double norm = 0.0;
    if (gradient_norm(l, step, &norm) < 0)
        return -(int)error_kind_now();
    fill_orders(l, o, step, norm);
    if (o->skip && !l->config.training_skip_nonfinite) {
        (void)error_set(ERROR_FAILED, "step %llu: the gradient norm is %g",
                        (unsigned long long)step, o->norm);
        return error_hint("step %llu is committed and intact; [training] skip_nonfinite = true "
                          "would skip such steps",
                          (unsigned long long)step - 1);
    }
    if (o->skip)
        tell_skip(l, o);
    int weighed = weigh_spike(l, o);
    if (weighed <= 0)
        return weighed;
    l->coordinator.t = o->t;
    if (!o->skip)
        spike_window_push(&l->coordinator.window.count, l->coordinator.window.loss,
                          l->coordinator.window.norm, o->loss, o->norm);
    fault_point(FAULT_launcher_before_apply);
    order(l, &orders->apply_step, step);
    return 0;
}

static void begin_next(struct launcher *l)
{
    struct launcher_control *orders = l->session.orders;
    struct coordinator *c = &l->coordinator;
    if (fact(&orders->apply_step) < c->begun || c->begun >= last_step(l) ||
        evaluation_due(l, c->begun))
        return;
    order(l, &orders->begin_step, ++c->begun);
    fault_point(FAULT_launcher_step_begun);
}

/* -- commit -- */

/* 0 when this step's line and those since the last commit are durable. A full disk pauses the run
 * here: no line, no commit. */
static int flush_lines(struct launcher *l, uint64_t step)
{
    char limit[SIZE_TEXT_BYTES_MAX];
    int waiting = l->coordinator.paused;
    int rc = metrics_flush(l->metrics);
    l->coordinator.paused = rc == METRICS_FULL;
    if (rc == METRICS_FULL && !waiting)
        progress_warn(l->progress,
                      "%s: the disk is full: training pauses before the commit of step %llu until "
                      "there is room, for at most %s",
                      metrics_path(l->metrics), (unsigned long long)step,
                      size_format_duration(limit, sizeof limit, metrics_patience_s()));
    if (rc == 0 && waiting)
        progress_say(l->progress, "there is room again: training goes on");
    return rc;
}

/* A complete step's line; and, where it is due, the order to commit it. */
static int ask_commit(struct launcher *l)
{
    struct launcher_control *orders = l->session.orders;
    struct coordinator *c = &l->coordinator;
    uint64_t complete = c->complete;
    int due = complete > fact(&orders->commit_step) && commit_due(l, complete);
    if (complete > c->lined) {
        if (step_line_write(l, complete) < 0)
            return -(int)error_kind_now();
        c->lined = complete;
        if (!due)
            step_line_show(l, complete);
    }
    if (!due)
        return 0;
    int rc = mutant(MUTANT_line_after_record) ? 0 : flush_lines(l, complete);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    fault_point(FAULT_launcher_before_commit);
    order(l, &orders->commit_step, complete);
    fault_point(FAULT_launcher_commit_ordered);
    return 0;
}

/* How long the next forward had been running when this step became durable. */
static double overlap(const struct launcher *l, uint64_t step)
{
    uint64_t committed = l->session.io->committed_ns[step % PLAN_SLACK_STEPS];
    uint64_t applied = l->session.io->apply_begin_ns[step % PLAN_SLACK_STEPS];
    uint64_t began = l->session.gpu->results[(step + 1) % PLAN_SLACK_STEPS].begin_ns;
    return began > applied && began < committed ? (double)(committed - began) * 1e-9 : 0.0;
}

static void after_commit(struct launcher *l)
{
    struct coordinator *c = &l->coordinator;
    uint64_t committed = c->committed;
    char fields[128];
    if (committed < c->first || committed <= c->announced)
        return;
    fault_point(FAULT_launcher_after_commit);
    c->announced = committed;
    (void)snprintf(fields, sizeof fields, ", \"step\": %llu, \"next_forward_ran_s\": %.6f",
                   (unsigned long long)committed, overlap(l, committed));
    metrics_event(l->metrics, "commit", fields);
    step_line_show(l, committed);
    if (export_due(l, committed)) {
        c->exported = committed;
        order(l, &l->session.orders->export_step, committed);
        fault_point(FAULT_launcher_export_ordered);
    }
}

/* An export that could not be written costs no training; that of the last step is what the run was
 * for, so it is the run's failure. */
static int tell_lost_exports(struct launcher *l)
{
    struct coordinator *c = &l->coordinator;
    const char *why = l->session.io->export_error;
    uint64_t step = fact(&l->session.io->export_given_up);
    char quoted[CONTROL_ERROR_BYTES + 512], fields[CONTROL_ERROR_BYTES + 640];
    if (step <= c->given_up)
        return 0;
    c->given_up = step;
    (void)snprintf(fields, sizeof fields, ", \"step\": %llu, \"why\": %s", (unsigned long long)step,
                   metrics_quote(quoted, sizeof quoted, why));
    metrics_event(l->metrics, "export_failed", fields);
    if (step < c->steps) {
        progress_warn(l->progress, "the export of step %llu is given up, training goes on: %s",
                      (unsigned long long)step, why);
        return 0;
    }
    (void)error_set(ERROR_FAILED, "the export of step %llu, the last one, failed: %s",
                    (unsigned long long)step, why);
    return error_hint("the run is trained to its end and its state is intact: start it again to "
                      "export, or `mtlaunch export %s OUT_DIR` into another file system",
                      l->run.path);
}

/* -- evaluation and samples, between steps -- */

static void tell_evaluation(struct launcher *l, uint64_t step)
{
    const struct worker_control *gpu = l->session.gpu;
    double tokens = (double)fact(&gpu->evaluate_tokens);
    double loss = atomic_load_explicit(&gpu->evaluate_loss_sum, memory_order_acquire) /
                  (tokens > 0 ? tokens : 1);
    char fields[256], numbers[128] = "\"val_loss\": null, \"perplexity\": null";
    if (isfinite(exp(loss))) /* JSON has no NaN and no Inf */
        (void)snprintf(numbers, sizeof numbers, "\"val_loss\": %.9g, \"perplexity\": %.9g", loss,
                       exp(loss));
    (void)snprintf(fields, sizeof fields, ", \"step\": %llu, %s, \"tokens\": %.0f",
                   (unsigned long long)step, numbers, tokens);
    metrics_event(l->metrics, "eval", fields);
    progress_say(l->progress, "step %llu: validation loss %.4f, perplexity %.2f over %.0f tokens",
                 (unsigned long long)step, loss, exp(loss), tokens);
}

/* Without validation data an evaluation is samples alone. */
static int has_validation(const struct launcher *l)
{
    return l->config.data_validation.count > 0 || l->config.data_val_fraction > 0.0;
}

/* Evaluates the newest commit when that is due: 1 while it goes on, or negative. */
static int evaluate(struct launcher *l)
{
    struct session *s = &l->session;
    struct coordinator *c = &l->coordinator;
    uint64_t step = c->committed;
    if (!evaluation_due(l, step) || c->begun > step || fact(&s->orders->apply_step) > step)
        return 0;
    uint64_t asked = fact(&s->orders->evaluate_request);
    if (!c->evaluating) {
        c->evaluating = 1;
        if (has_validation(l)) {
            order(l, &s->orders->evaluate_request, asked + 1);
            fault_point(FAULT_launcher_evaluation_ordered);
            return 1;
        }
    }
    if (fact(&s->gpu->evaluated) < asked)
        return 1;
    uint64_t drawn = fact(&s->orders->generate_request);
    if (c->evaluating == 1) {
        if (has_validation(l))
            tell_evaluation(l, step);
        c->evaluating = 2;
        if (l->config.eval_sample_prompts.count) {
            order(l, &s->orders->generate_request, drawn + 1);
            return 1;
        }
    }
    if (fact(&s->gpu->generated) < drawn)
        return 1;
    if (c->evaluating == 2 && l->config.eval_sample_prompts.count) {
        if (samples_begin(l, step) < 0)
            return -(int)error_kind_now();
        c->evaluating = 3;
    }
    if (c->evaluating == 3 && samples_turn(l))
        return 1;
    c->evaluating = 0;
    c->evaluated = step;
    return 0;
}

static int is_dead(const struct launcher *l, enum role role)
{
    for (uint32_t i = 0; i < l->session.n_children; i++)
        if (l->session.children[i].role == role && child_has_ended(&l->session.children[i]))
            return 1;
    return 0;
}

/* What this turn goes by: 1, or negative; 0 if what is new comes from a worker that has died, which
 * may have scribbled on its control page: then its successor is asked. A living one does what it is
 * told and no more. */
static int take_facts(struct launcher *l)
{
    const struct launcher_control *orders = l->session.orders;
    const struct worker_control *io = l->session.io;
    struct coordinator *c = &l->coordinator;
    uint64_t complete = fact(&io->complete_step), committed = fact(&io->committed_step),
             written = fact(&io->exported_step);
    if (complete == c->complete && committed == c->committed && written == c->written)
        return 1;
    int believed = mutant(MUTANT_facts_of_the_dead);
    if (!believed && is_dead(l, ROLE_IO)) /* asked after the facts were read */
        return 0;
    if (!believed &&
        (complete > fact(&orders->apply_step) || committed > fact(&orders->commit_step) ||
         written > fact(&orders->export_step)))
        return error_set(
            ERROR_DAMAGED,
            "io_worker says that step %llu is complete, %llu committed, %llu exported; "
            "it was told to apply %llu, commit %llu, export %llu",
            (unsigned long long)complete, (unsigned long long)committed,
            (unsigned long long)written, (unsigned long long)fact(&orders->apply_step),
            (unsigned long long)fact(&orders->commit_step),
            (unsigned long long)fact(&orders->export_step));
    c->complete = complete;
    c->committed = committed;
    c->written = written;
    return 1;
}

int coordinator_turn(struct launcher *l)
{
    int rc = take_facts(l);
    if (rc <= 0)
        return rc;
    if (ask_commit(l) < 0 || decide(l) < 0)
        return -(int)error_kind_now();
    after_commit(l);
    int evaluating = evaluate(l);
    if (evaluating < 0)
        return evaluating;
    begin_next(l);
    int exporting = export_pending(l); /* before asking how it went: that is written first */
    if (tell_lost_exports(l) < 0)
        return -(int)error_kind_now();
    uint64_t committed = l->coordinator.committed;
    findings_tell(l); /* after that look, so that none of a committed step is missed */
    int done = committed >= last_step(l) && l->coordinator.begun <= committed && !evaluating &&
               !evaluation_due(l, committed) && !exporting;
    return done;
}
