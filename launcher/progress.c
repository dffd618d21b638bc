#include "launcher/progress.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/size.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/printable.h"

enum { SAY_BYTES = 8192, SAY_PATIENCE_MS = 200, EMIT_BYTES = 4096 };
enum { BAR_CELLS = 24, STARTUP_INTERVAL_MS = 500 };

struct progress {
    enum config_log_progress mode;
    uint64_t interval;
    int on_bar; /* the cursor stands behind an unfinished bar line */
    uint32_t activity;
    uint64_t activity_ns, shown_ns, activity_done;
};

int progress_open(struct progress **out, enum config_log_progress mode, uint64_t interval)
{
    struct progress *p = calloc(1, sizeof *p);
    *out = p;
    if (!p)
        return error_set(ERROR_FAILED, "out of memory");
    p->mode = mode != CONFIG_PROGRESS_AUTO ? mode
              : isatty(STDERR_FILENO)      ? CONFIG_PROGRESS_BAR
                                           : CONFIG_PROGRESS_PLAIN;
    p->interval = interval;
    return 0;
}

/* Writes if somebody takes it: a stopped terminal or a full pipe must not stop the training, so
 * after `patience_ms` the text is dropped. */
static void emit(const char *text, size_t n, int patience_ms)
{
    while (n) {
        struct pollfd fd = {.fd = STDERR_FILENO, .events = POLLOUT};
        size_t some =
            n < EMIT_BYTES ? n : EMIT_BYTES; /* what a writable pipe takes without waiting */
        if (poll(&fd, 1, patience_ms) <= 0 || !(fd.revents & POLLOUT))
            return;
        ssize_t wrote = write(STDERR_FILENO, text, some);
        if (wrote <= 0)
            return;
        text += wrote;
        n -= (size_t)wrote;
    }
}

static void end_bar(struct progress *p)
{
    if (p->on_bar)
        emit("\n", 1, 0);
    p->on_bar = 0;
}

void progress_close(struct progress *p)
{
    if (!p)
        return;
    end_bar(p);
    free(p);
}

/* One line; on a terminal it replaces the one before. */
static void show(struct progress *p, const char *line)
{
    char text[640];
    int n = 0;
    if (p->mode == CONFIG_PROGRESS_BAR) {
        n = snprintf(text, sizeof text, "\r%s\033[K", line);
        p->on_bar = 1;
    } else if (p->mode == CONFIG_PROGRESS_PLAIN) {
        n = snprintf(text, sizeof text, "%s\n", line);
    }
    if (n > 0)
        emit(text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1, 0);
}

static void draw_bar(char *out, double part)
{
    for (int i = 0; i < BAR_CELLS; i++)
        out[i] = i < (int)(part * BAR_CELLS) ? '#' : '.';
    out[BAR_CELLS] = '\0';
}

void progress_step(struct progress *p, const struct progress_step *s)
{
    char line[512], bar[BAR_CELLS + 1], eta[SIZE_TEXT_BYTES_MAX], ram[SIZE_TEXT_BYTES_MAX],
        store[SIZE_TEXT_BYTES_MAX], written[SIZE_TEXT_BYTES_MAX];
    if (s->step % p->interval != 0 && s->step != s->steps)
        return;
    draw_bar(bar, (double)s->step / (double)s->steps);
    (void)snprintf(
        line, sizeof line,
        "%s%s%sstep %llu/%llu  loss %.4f  grad norm %.3f  lr %.3g  %.0f tokens/s  ETA %s  RAM %s  "
        "store %s  wrote %s%s",
        p->mode == CONFIG_PROGRESS_BAR ? "[" : "", p->mode == CONFIG_PROGRESS_BAR ? bar : "",
        p->mode == CONFIG_PROGRESS_BAR ? "] " : "", (unsigned long long)s->step,
        (unsigned long long)s->steps, s->loss, s->norm, s->learning_rate, s->tokens_per_s,
        size_format_duration(eta, sizeof eta, s->eta_s), size_format(ram, sizeof ram, s->ram_bytes),
        size_format(store, sizeof store, s->store_bytes),
        size_format(written, sizeof written, s->written_bytes), s->skipped ? "  SKIPPED" : "");
    show(p, line);
}

void progress_activity(struct progress *p, enum worker_activity activity, uint64_t done,
                       uint64_t total)
{
    static const char *const names[ACTIVITY_COUNT] = {
#define X(name, text) text,
        WORKER_ACTIVITY_LIST(X)
#undef X
    };
    uint64_t now = clock_now_ns();
    char line[256], a[SIZE_TEXT_BYTES_MAX], b[SIZE_TEXT_BYTES_MAX], rate_text[SIZE_TEXT_BYTES_MAX],
        eta[SIZE_TEXT_BYTES_MAX];
    if (activity >= ACTIVITY_COUNT || activity == ACTIVITY_STARTING ||
        activity == ACTIVITY_WORKING || total == 0)
        return;
    if (activity != p->activity || done < p->activity_done) {
        p->activity = activity;
        p->activity_ns = p->shown_ns = now;
        p->activity_done = done;
    }
    if (now - p->shown_ns < STARTUP_INTERVAL_MS * 1000000ull)
        return;
    p->shown_ns = now;
    if (activity == ACTIVITY_FENCE) {
        (void)snprintf(line, sizeof line, "%s: %s of at most %s", names[activity],
                       size_format_duration(a, sizeof a, (double)done * 1e-3),
                       size_format_duration(b, sizeof b, (double)total * 1e-3));
        show(p, line);
        return;
    }
    double rate = (double)(done - p->activity_done) / ((double)(now - p->activity_ns) * 1e-9);
    (void)snprintf(
        line, sizeof line, "%s: %s of %s, %s/s, ETA %s", names[activity],
        size_format(a, sizeof a, done), size_format(b, sizeof b, total),
        size_format(rate_text, sizeof rate_text, (uint64_t)rate),
        size_format_duration(eta, sizeof eta, rate > 0.0 ? (double)(total - done) / rate : -1.0));
    show(p, line);
}

void progress_startup(struct progress *p, const struct worker_control *control)
{
    uint32_t activity = atomic_load_explicit(&control->progress.activity, memory_order_relaxed);
    uint64_t done = atomic_load_explicit(&control->progress.done, memory_order_relaxed);
    uint64_t total = atomic_load_explicit(&control->progress.total, memory_order_relaxed);
    progress_activity(p, (enum worker_activity)activity, done, total);
}

/* Text may come from the model or from another process. */
static void put_clean(const char *text)
{
    char clean[4 * SAY_BYTES];
    size_t n = printable_copy(clean, sizeof clean - 1, text);
    clean[n++] = '\n';
    emit(clean, n, SAY_PATIENCE_MS);
}

void progress_say(struct progress *p, const char *format, ...)
{
    char text[SAY_BYTES];
    va_list args;
    if (p->mode == CONFIG_PROGRESS_NONE)
        return;
    end_bar(p);
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    put_clean(text);
}

void progress_warn(struct progress *p, const char *format, ...)
{
    char text[SAY_BYTES];
    va_list args;
    end_bar(p);
    va_start(args, format);
    int n = snprintf(text, sizeof text, "warning: ");
    (void)vsnprintf(text + n, sizeof text - (size_t)n, format, args);
    va_end(args);
    put_clean(text);
}
