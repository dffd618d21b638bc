/* `mtlaunch eval` and `mtlaunch generate`: forward only, on a run's newest commit or a Hugging Face
 * folder, through the same io_worker and gpu_worker as training. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/command.h"
#include "launcher/progress.h"
#include "launcher/prompts.h"
#include "launcher/run_dir.h"
#include "launcher/supervisor.h"
#include "launcher/target.h"
#include "procs/error.h"
#include "procs/printable.h"

enum {
    INFER_SEQ_LEN = 1024, /* of a Hugging Face folder, unless it has fewer positions */
    INFER_MICROBATCH_TOKENS = 2048,
    GENERATE_SEQ_LEN = 256, /* prompt tokens fed per sweep */
    PROMPTS_MAX = 64,
};

/* -- eval -- */

static int begin_evaluation(struct launcher *l)
{
    atomic_store_explicit(&l->session.orders->evaluate_request, 1, memory_order_release);
    session_wake(l);
    return 0;
}

static int evaluation_done(struct launcher *l)
{
    return atomic_load_explicit(&l->session.gpu->evaluated, memory_order_acquire) > 0;
}

static void print_evaluation(struct launcher *l)
{
    double tokens =
        (double)atomic_load_explicit(&l->session.gpu->evaluate_tokens, memory_order_acquire);
    double loss =
        atomic_load_explicit(&l->session.gpu->evaluate_loss_sum, memory_order_acquire) / tokens;
    (void)printf("tokens %.0f loss %.9g perplexity %.9g\n", tokens, loss, exp(loss));
}

static void shape_evaluation(struct launcher *l, unsigned long long seq_len)
{
    struct config *c = &l->config;
    if (seq_len)
        c->training_seq_len = seq_len;
    uint64_t rows = INFER_MICROBATCH_TOKENS / c->training_seq_len;
    c->training_micro_batch_size = rows ? rows : 1;
    c->training_gradient_accumulation_steps = 4;
    c->data_val_fraction = 0.0;
    c->data_shuffle = false;
    c->eval_interval = 0;
    c->eval_sample_prompts.count = 0;
}

int command_eval(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct options o;
    struct target target = {0};
    struct supervisor_job job = {.request = {.mode = PLAN_EVALUATE},
                                 .begin = begin_evaluation,
                                 .turn = evaluation_done,
                                 .done = print_evaluation};
    unsigned long long seq_len = 0;
    int rc = options_open(&o, a);
    const char *data = rc == 0 ? options_value(&o, "data") : NULL;
    if (rc == 0)
        rc = options_u64(&o, "seq-len", 0, &seq_len);
    const char *path = rc == 0 ? options_positional(&o) : NULL;
    if (rc == 0 && (!path || !data))
        rc = error_set(ERROR_USER, "eval: expected RUN_DIR|HF_DIR --data FILE");
    if (rc == 0)
        rc = options_close(&o);
    if (rc == 0)
        rc = target_open(&target, &l, path, data);
    if (rc == 0) {
        if (!target.is_run && l.layout.config.max_position < INFER_SEQ_LEN)
            l.config.training_seq_len = l.layout.config.max_position;
        shape_evaluation(&l, seq_len);
        rc = target_run(&target, &l, &job);
    }
    return target_close(&target, &l, rc);
}

/* -- generate -- */

static int begin_generation(struct launcher *l)
{
    atomic_store_explicit(&l->session.orders->generate_request, 1, memory_order_release);
    session_wake(l);
    return 0;
}

static int generation_done(struct launcher *l)
{
    return atomic_load_explicit(&l->session.gpu->generated, memory_order_acquire) > 0;
}

/* A file gets the bytes that the model said; a terminal is not to obey them. */
static void print_text(const char *text, uint64_t bytes)
{
    if (!isatty(STDOUT_FILENO))
        (void)fwrite(text, 1, bytes, stdout);
    else
        for (uint64_t at = 0; at < bytes; at += strlen(text + at) + 1)
            printable_put(text + at, stdout); /* NUL bytes are left out */
}

/* What was generated, kept until the workers are gone: decoding may take a moment. */
static struct {
    struct prompts prompts;
    struct generated *generated;
} said;

static void keep_generation(struct launcher *l)
{
    (void)prompts_take_generated(l, &said.prompts,
                                 &said.generated); /* told by print_generation() */
}

static int print_generation(struct launcher *l, const char *const *prompts)
{
    char *texts[PROMPTS_MAX] = {0};
    uint64_t bytes[PROMPTS_MAX];
    if (!said.generated)
        return error_set(ERROR_FAILED, "what the model said was damaged in memory; try again");
    int rc = prompts_decode(l, &said.prompts, said.generated, texts, bytes);
    for (uint64_t p = 0; p < said.prompts.n; p++) {
        if (rc == 0) {
            print_text(prompts[p], strlen(prompts[p]));
            print_text(texts[p], bytes[p]);
            (void)fputc('\n', stdout);
        }
        free(texts[p]);
    }
    return rc;
}

static int read_generate_options(struct options *o, struct plan_request *r, const char **prompts)
{
    unsigned long long n = 0, seed = 0;
    while (r->n_prompts < PROMPTS_MAX && (prompts[r->n_prompts] = options_value(o, "prompt")))
        r->n_prompts++;
    r->prompts = prompts;
    if (options_u64(o, "max-new-tokens", 128, &n) < 0 || options_u64(o, "seed", 0, &seed) < 0 ||
        options_double(o, "temperature", 0.0, &r->temperature) < 0 ||
        options_double(o, "top-p", 1.0, &r->top_p) < 0)
        return -(int)error_kind_now();
    r->max_new_tokens = n;
    r->sampling_seed = seed;
    if (r->n_prompts == 0)
        return error_set(ERROR_USER, "generate: expected RUN_DIR|HF_DIR --prompt TEXT");
    if (!(r->top_p > 0.0) || r->top_p > 1.0)
        return error_set(ERROR_USER, "--top-p: expected a number above 0 and at most 1, found %g",
                         r->top_p);
    return 0;
}

static int check_generation(const struct launcher *l, const struct plan_request *r)
{
    const struct prompts *e = r->encoded;
    for (uint64_t p = 0; p < e->n; p++) {
        uint64_t need = (uint64_t)(e->first[p + 1] - e->first[p]) + 1 + r->max_new_tokens;
        if (need > l->layout.config.max_position)
            return error_set(
                ERROR_USER, "prompt and --max-new-tokens need %llu positions, the model has %llu",
                (unsigned long long)need, (unsigned long long)l->layout.config.max_position);
    }
    return 0;
}

int command_generate(const struct arguments *a)
{
    struct launcher l = {.signal_fd = -1, .run.lock_fd = -1};
    struct options o;
    struct target target = {0};
    const char *prompts[PROMPTS_MAX + 1] = {0};
    struct supervisor_job job = {.request = {.mode = PLAN_GENERATE},
                                 .begin = begin_generation,
                                 .turn = generation_done,
                                 .done = keep_generation};
    int rc = options_open(&o, a);
    if (rc == 0)
        rc = read_generate_options(&o, &job.request, prompts);
    const char *path = rc == 0 ? options_positional(&o) : NULL;
    if (rc == 0 && !path)
        rc = error_set(ERROR_USER, "generate: expected RUN_DIR|HF_DIR --prompt TEXT");
    if (rc == 0)
        rc = options_close(&o);
    if (rc == 0)
        rc = target_open(&target, &l, path, NULL);
    job.request.encoded = &said.prompts;
    if (rc == 0)
        rc = prompts_encode(&l, prompts, job.request.n_prompts, &said.prompts);
    if (rc == 0)
        rc = check_generation(&l, &job.request);
    if (rc == 0) {
        uint64_t most = l.layout.config.max_position;
        shape_evaluation(&l, most < GENERATE_SEQ_LEN ? most : GENERATE_SEQ_LEN);
        l.config.training_micro_batch_size = l.config.training_gradient_accumulation_steps = 1;
        rc = target_run(&target, &l, &job);
    }
    if (rc == 0)
        rc = print_generation(&l, prompts);
    prompts_free(&said.prompts);
    free(said.generated);
    return target_close(&target, &l, rc);
}
