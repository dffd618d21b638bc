#include "launcher/step_line.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/worker.h"
#include "launcher/metrics.h"
#include "launcher/progress.h"
#include "launcher/session.h"
#include "procs/clock.h"
#include "procs/error.h"

enum { LINE_BYTES = 12288 };

/* The hash is two little-endian words, low and high; printed as one 128-bit number. */
void step_line_hash(char text[33], const uint8_t hash[16])
{
    for (int i = 0; i < 16; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", hash[15 - i]);
}

/* "gpu_worker.0": {"WEIGHTS": 0.012, ...}: seconds slept for want of each ring since the last line.
 */
static int format_waits(struct launcher *l, char *out, size_t bytes)
{
    size_t n = 0;
    for (uint32_t i = 0; i < l->session.n_children; i++) {
        const struct child *child = &l->session.children[i];
        const struct worker_control *w = session_control(l, child);
        char name[MESSAGE_PEER_BYTES];
        worker_name(name, child->role, child->index);
        n += (size_t)snprintf(out + n, bytes - n, "%s\"%s\": {", i ? ", " : "", name);
        const char *comma = "";
        for (int r = 0; r < RING_COUNT; r++) {
            uint64_t now = atomic_load_explicit(&w->wait_ns[r], memory_order_relaxed);
            uint64_t spent = now - l->coordinator.wait_base[i][r];
            l->coordinator.wait_base[i][r] = now;
            if (now == 0 || n + 128 > bytes)
                continue;
            n += (size_t)snprintf(out + n, bytes - n, "%s\"%s\": %.6f", comma,
                                  topology_rings[r].name, (double)spent * 1e-9);
            comma = ", ";
        }
        if (n + 128 > bytes)
            return error_set(ERROR_FAILED, "the step's line is longer than %zu bytes", bytes);
        n += (size_t)snprintf(out + n, bytes - n, "}");
    }
    return 0;
}

/* Positions computed in a step, labelled or not. */
static uint64_t tokens_of(const struct launcher *l)
{
    const struct plan *p = l->session.plan;
    return p->microbatches * p->micro_batch_size * p->seq_len;
}

/* JSON has no NaN and no Inf. */
static const char *number(char *out, size_t bytes, double value)
{
    (void)snprintf(out, bytes, isfinite(value) ? "%.17g" : "null", value);
    return out;
}

static double seconds_of(struct launcher *l, uint64_t step)
{
    uint64_t now = l->session.io->complete_ns[step % PLAN_SLACK_STEPS];
    double seconds = (double)(now - l->coordinator.step_begin_ns) * 1e-9;
    l->coordinator.step_begin_ns = now;
    return seconds > 0.0 ? seconds : 1e-9;
}

/* What moved between store and RAM since the last line: this step's slots, the commit before it. */
static uint64_t bytes_since(const _Atomic uint64_t *counter, uint64_t *base)
{
    uint64_t now = atomic_load_explicit(counter, memory_order_relaxed), moved = now - *base;
    *base = now;
    return moved;
}

int step_line_write(struct launcher *l, uint64_t step)
{
    const struct step_orders *o = &l->session.orders->orders[step % PLAN_SLACK_STEPS];
    char line[LINE_BYTES], waits[LINE_BYTES / 2], hash[33], loss[32], norm[32];
    struct coordinator *c = &l->coordinator;
    double step_s = seconds_of(l, step);
    const struct step_result *r = &l->session.gpu->results[step % PLAN_SLACK_STEPS];
    c->step_s = step_s;
    c->mean_step_s = c->mean_step_s > 0.0 ? 0.9 * c->mean_step_s + 0.1 * step_s : step_s;
    step_line_hash(hash, l->session.io->state_hash[step % PLAN_SLACK_STEPS]);
    if (format_waits(l, waits, sizeof waits) < 0)
        return -(int)error_kind_now();
    uint64_t read = bytes_since(&l->session.io->bytes_read, &c->read_base);
    c->step_written = bytes_since(&l->session.io->bytes_written, &c->written_base);
    int n = snprintf(
        line, sizeof line,
        "{\"step\": %llu, \"loss\": %s, \"grad_norm\": %s, \"learning_rate\": %.9g, "
        "\"tokens\": %llu, \"labelled_tokens\": %llu, \"tokens_per_s\": %.6g, \"step_s\": %.6f, "
        "\"forward_s\": %.6f, \"backward_s\": %.6f, \"skipped\": %s, \"state_hash\": \"%s\", "
        "\"bytes_read\": %llu, \"bytes_written\": %llu, \"wait_s\": {%s}}",
        (unsigned long long)step, number(loss, sizeof loss, o->loss),
        number(norm, sizeof norm, o->norm), (double)o->learning_rate,
        (unsigned long long)tokens_of(l), (unsigned long long)o->labelled,
        (double)tokens_of(l) / step_s, step_s, (double)(r->forward_ns - r->begin_ns) * 1e-9,
        (double)(r->backward_ns - r->forward_ns) * 1e-9, o->skip ? "true" : "false", hash,
        (unsigned long long)read, (unsigned long long)c->step_written, waits);
    if (n < 0 || n >= (int)sizeof line)
        return error_set(ERROR_FAILED, "the step's line is longer than %d bytes", LINE_BYTES);
    return metrics_append(l->metrics, line);
}

void step_line_show(struct launcher *l, uint64_t step)
{
    const struct coordinator *c = &l->coordinator;
    const struct step_orders *o = &l->session.orders->orders[step % PLAN_SLACK_STEPS];
    struct progress_step shown = {
        .step = step,
        .steps = c->steps,
        .loss = o->loss,
        .norm = o->norm,
        .learning_rate = (double)o->learning_rate,
        .tokens_per_s = (double)tokens_of(l) / c->step_s,
        .eta_s = (double)(c->steps - step) * c->mean_step_s,
        .ram_bytes = l->session.plan->segment_bytes + l->session.gpu->device_bytes,
        .store_bytes = l->session.io->store_bytes,
        .written_bytes = c->step_written,
        .skipped = o->skip != 0,
    };
    progress_step(l->progress, &shown);
}
