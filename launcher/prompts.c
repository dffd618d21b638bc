#include "launcher/prompts.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/tokenizer_child.h"
#include "launcher/tokenizing.h"
#include "model/tokenizer_bytes.h"
#include "procs/check.h"
#include "procs/error.h"

/* -- what arrives, as a list that grows -- */

struct reply {
    struct launcher *l;
    struct prompts *prompts; /* of "ids" lines */
    uint64_t room;           /* of prompts->ids */
    char **texts;            /* of "text" lines */
    uint64_t *bytes;
    uint64_t n;
    int rc; /* the first thing wrong with a line */
};

static int bad_line(const char *name)
{
    return error_set(ERROR_FAILED, "the tokenizer's answer is not one: a line \"%s\"", name);
}

static int32_t total(const struct prompts *p)
{
    return p->first[p->n];
}

static int append_id(struct reply *r, int32_t id)
{
    struct prompts *p = r->prompts;
    uint64_t used = (uint64_t)total(p), vocabulary = r->l->layout.config.vocab_size;
    if (id < 0 || (uint64_t)id >= vocabulary)
        return error_set(ERROR_USER,
                         "the tokenizer makes id %d of the prompt, expected less than the model's "
                         "vocab_size = %" PRIu64,
                         id, vocabulary);
    if (used == r->room) {
        CHECK(used < INT32_MAX / 2);
        r->room = 2 * r->room + 256;
        p->ids = realloc(p->ids, r->room * sizeof *p->ids);
        CHECK(p->ids != NULL);
    }
    p->ids[used] = id;
    p->first[p->n]++;
    return 0;
}

/* Prompts come in order: `n` is the number that are begun. */
static int take_ids(struct reply *r, uint64_t index, const char *value)
{
    struct prompts *p = r->prompts;
    while (p->n < index + 1) {
        p->n++;
        p->first[p->n] = p->first[p->n - 1];
    }
    while (*value) {
        char *end = NULL;
        errno = 0;
        long id = strtol(value, &end, 10);
        if (errno || end == value || id < INT32_MIN || id > INT32_MAX)
            return bad_line("ids");
        if (append_id(r, (int32_t)id) < 0)
            return -(int)error_kind_now();
        value = end + (*end == ' ');
    }
    return 0;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int take_text(struct reply *r, uint64_t index, const char *value)
{
    size_t n = strlen(value) / 2;
    char *text = realloc(r->texts[index], r->bytes[index] + n + 1);
    CHECK(text != NULL);
    r->texts[index] = text;
    for (size_t i = 0; i < n; i++) {
        int high = digit(value[2 * i]), low = digit(value[2 * i + 1]);
        if (high < 0 || low < 0)
            return bad_line("text");
        text[r->bytes[index]++] = (char)(high << 4 | low);
    }
    text[r->bytes[index]] = '\0';
    return 0;
}

static void on_reply(void *context, const char *name, uint64_t index, const char *value)
{
    struct reply *r = context;
    if (r->rc < 0)
        return;
    if (index < r->n && r->prompts && strcmp(name, "ids") == 0 && index + 1 >= r->prompts->n)
        r->rc = take_ids(r, index, value);
    else if (index < r->n && r->texts && strcmp(name, "text") == 0)
        r->rc = take_text(r, index, value);
    else
        r->rc = bad_line(name);
}

/* -- bytes -- */

static int is_bytes(const struct launcher *l)
{
    return strcmp(l->config.model_tokenizer, "bytes") == 0;
}

static int encode_bytes(struct reply *r, const char *const *texts)
{
    for (uint64_t p = 0; p < r->n; p++) {
        r->prompts->n = p + 1;
        r->prompts->first[p + 1] = r->prompts->first[p];
        for (const char *c = texts[p]; *c; c++)
            if (append_id(r, (unsigned char)*c) < 0)
                return -(int)error_kind_now();
        if (!texts[p][0] && append_id(r, TOKENIZER_BYTES_END) < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

/* -- the child -- */

struct job {
    char *text;
    size_t bytes;
    FILE *file;
    struct tokenizer_place place;
};

static int begin_job(struct job *j, const struct launcher *l, const char *mode)
{
    char path[LAUNCHER_PATH_BYTES];
    const struct model_config *model = &l->layout.config;
    memset(j, 0, sizeof *j);
    if (tokenizing_find_tokenizer(&l->config, path) < 0)
        return error_wrap("a prompt is text");
    if (tokenizer_place(&j->place) < 0 || tokenizer_check(&j->place) < 0)
        return -(int)error_kind_now();
    j->file = open_memstream(&j->text, &j->bytes);
    CHECK(j->file != NULL);
    (void)fprintf(j->file, "mode=%s%ctokenizer=%s%ceos=", mode, 0, path, 0);
    if (model->n_eos)
        (void)fprintf(j->file, "%" PRId64, (int64_t)model->eos_token_id[0]);
    (void)fputc(0, j->file);
    return 0;
}

static int run_job(struct job *j, struct reply *r)
{
    struct tokenizer_reply reply = {.take = on_reply, .context = r};
    CHECK(fclose(j->file) == 0); /* memory */
    int rc = tokenizer_run(r->l, &j->place, j->text, j->bytes, &reply);
    free(j->text);
    return rc < 0 ? rc : r->rc;
}

static int encode_by_child(struct reply *r, const char *const *texts)
{
    struct job j;
    if (begin_job(&j, r->l, "encode") < 0)
        return -(int)error_kind_now();
    for (uint64_t p = 0; p < r->n; p++)
        (void)fprintf(j.file, "text=%s%c", texts[p], 0);
    if (run_job(&j, r) < 0)
        return -(int)error_kind_now();
    return r->prompts->n == r->n ? 0 : bad_line("ids, one is missing");
}

int prompts_encode(struct launcher *l, const char *const *texts, uint64_t n, struct prompts *out)
{
    memset(out, 0, sizeof *out);
    out->first = calloc(n + 1, sizeof *out->first);
    CHECK(out->first != NULL);
    struct reply r = {.l = l, .prompts = out, .n = n};
    int rc = is_bytes(l) ? encode_bytes(&r, texts) : encode_by_child(&r, texts);
    if (rc < 0)
        prompts_free(out);
    return rc;
}

int prompts_take_generated(const struct launcher *l, const struct prompts *prompts,
                           struct generated **out)
{
    const struct generated *g = segment_region(&l->session.segment, REGION_GENERATED, 0);
    uint64_t tokens_max = l->session.plan->generate.max_new_tokens;
    uint64_t bytes = generated_bytes(prompts->n, tokens_max);
    *out = malloc(bytes);
    CHECK(*out != NULL);
    memcpy(*out, g, bytes);
    int whole = (*out)->prompts == prompts->n && (*out)->tokens_max == tokens_max;
    for (uint64_t p = 0; whole && p < prompts->n; p++)
        whole = generated_counts(*out)[p] <= tokens_max;
    if (whole)
        return 0;
    free(*out);
    *out = NULL;
    return error_set(ERROR_DAMAGED,
                     "what gpu_worker generated: expected %" PRIu64 " prompts and at most %" PRIu64
                     " tokens of each",
                     prompts->n, tokens_max);
}

static void put_ids(FILE *file, const char *name, const int32_t *ids, uint64_t n)
{
    (void)fprintf(file, "%s=", name);
    for (uint64_t i = 0; i < n; i++)
        (void)fprintf(file, "%s%d", i ? " " : "", ids[i]);
    (void)fputc(0, file);
}

static void decode_bytes(struct reply *r, struct generated *g)
{
    for (uint64_t p = 0; p < r->n; p++)
        for (uint64_t i = 0; i < generated_counts(g)[p]; i++)
            r->bytes[p] +=
                tokenizer_bytes_decode(generated_tokens(g, p)[i], r->texts[p] + r->bytes[p]);
}

static void open_texts(struct reply *r, struct generated *g)
{
    for (uint64_t p = 0; p < r->n; p++) {
        r->bytes[p] = 0;
        r->texts[p] = calloc(generated_counts(g)[p] + 1, 1);
        CHECK(r->texts[p] != NULL);
    }
}

static int begin_decoding(struct job *j, const struct launcher *l, const struct prompts *prompts,
                          struct generated *g)
{
    if (begin_job(j, l, "decode") < 0)
        return -(int)error_kind_now();
    for (uint64_t p = 0; p < prompts->n; p++) {
        put_ids(j->file, "prompt", prompts->ids + prompts->first[p],
                (uint64_t)(prompts->first[p + 1] - prompts->first[p]));
        put_ids(j->file, "ids", generated_tokens(g, p), generated_counts(g)[p]);
    }
    return 0;
}

int prompts_decode(struct launcher *l, const struct prompts *prompts, struct generated *g,
                   char **texts, uint64_t *bytes)
{
    struct reply r = {.l = l, .texts = texts, .bytes = bytes, .n = prompts->n};
    struct job j;
    open_texts(&r, g);
    if (is_bytes(l)) {
        decode_bytes(&r, g);
        return 0;
    }
    return begin_decoding(&j, l, prompts, g) < 0 ? -(int)error_kind_now() : run_job(&j, &r);
}

/* -- decoding while something else goes on -- */

struct decoding {
    struct reply reply;
    struct tokenizer_child *child; /* NULL: bytes */
};

static int start_job(struct job *j, struct decoding *d)
{
    struct tokenizer_reply reply = {.take = on_reply, .context = &d->reply};
    CHECK(fclose(j->file) == 0); /* memory */
    int rc = tokenizer_start(&d->child, d->reply.l, &j->place, j->text, j->bytes, &reply);
    free(j->text);
    return rc;
}

int prompts_decode_begin(struct decoding **decoding, struct launcher *l,
                         const struct prompts *prompts, struct generated *g, char **texts,
                         uint64_t *bytes)
{
    struct decoding *d = calloc(1, sizeof *d);
    struct job j;
    int rc = 0;
    CHECK(d != NULL);
    d->reply = (struct reply){.l = l, .texts = texts, .bytes = bytes, .n = prompts->n};
    open_texts(&d->reply, g);
    if (is_bytes(l))
        decode_bytes(&d->reply, g);
    else if ((rc = begin_decoding(&j, l, prompts, g)) == 0)
        rc = start_job(&j, d);
    if (rc < 0)
        free(d);
    else
        *decoding = d;
    return rc;
}

int prompts_decode_turn(struct decoding **decoding)
{
    struct decoding *d = *decoding;
    int rc = d->child ? tokenizer_turn(&d->child) : 0;
    if (rc == 1 && d->reply.rc == 0)
        return 1;
    rc = rc < 0 ? rc : d->reply.rc;
    prompts_decode_drop(decoding);
    return rc;
}

void prompts_decode_drop(struct decoding **decoding)
{
    if (!*decoding)
        return;
    tokenizer_kill(&(*decoding)->child);
    free(*decoding);
    *decoding = NULL;
}

void prompts_free(struct prompts *prompts)
{
    free(prompts->ids);
    free(prompts->first);
    memset(prompts, 0, sizeof *prompts);
}
