#include "io_worker/data.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "io_worker/data_index.h"
#include "io_worker/data_source.h"
#include "io_worker/folder.h"
#include "model/random.h"
#include "model/tokenizer_bytes.h"
#include "procs/check.h"
#include "procs/error.h"

#define OPEN_FILES_MAX      32 /* descriptors, however many sources there are */
#define DESCRIBE_FILES_MAX  4  /* names printed per set */
#define FINGERPRINT_VERSION 2u

/* The sources of one kind of sample, and how their tokens and samples are numbered through. */
struct source_list {
    struct data_source *sources;
    size_t n;
    uint64_t *token_first;  /* (n + 1) number of a source's first token */
    uint64_t *sample_first; /* (n + 1) the same for samples, without packing */
    uint64_t samples;
    uint64_t dropped; /* packed: tokens at the end that no sample sees */
};

struct open_file {
    const char *path; /* of a source, its index or its checks: compared by address */
    int fd;
};

struct data {
    struct data_reading reading; /* strings owned */
    uint64_t seed;
    double val_fraction;
    bool packing, shuffle, keep_partial;
    bool text;                            /* tokenized here, in bytes */
    bool indexed;                         /* samples come from an index, not out of the stream */
    struct source_list train, validation; /* validation.n == 0: none, or a part of train */
    uint64_t train_samples, held_out;     /* of train.samples; held_out validate */
    struct open_file files[OPEN_FILES_MAX];
    size_t next_file;
    uint64_t window; /* tokens that a sample sees: seq_len, or one more for shards */
    uint8_t *raw;    /* (window * 4) */
    int32_t *tokens; /* (window) */
    uint8_t *ends;   /* (window) 1: a document ends with this token */
    uint8_t *masked; /* (window) 1: no label */
};

/* ---- opening ---- */

static int check_config(const struct data_config *c)
{
    if (c->n_train == 0)
        return error_set(ERROR_USER, "data.train names no file");
    if (c->seq_len < 2)
        return error_set(ERROR_USER, "training.seq_len: expected at least 2, found %" PRIu64,
                         c->seq_len);
    if (!(c->val_fraction >= 0.0 && c->val_fraction < 1.0))
        return error_set(ERROR_USER,
                         "data.val_fraction: expected at least 0 and less than 1, "
                         "found %g",
                         c->val_fraction);
    if (c->val_fraction > 0.0 && c->n_validation > 0)
        return error_set(ERROR_USER, "data.validation and data.val_fraction are both given, "
                                     "expected one of them");
    if (c->vocab_size == 0 || c->vocab_size > INT32_MAX)
        return error_set(ERROR_USER, "vocab_size: expected 1 .. 2147483647, found %" PRIu64,
                         c->vocab_size);
    return 0;
}

static int check_tokenizer(const struct data_config *c, const char *path)
{
    if (c->tokenizer == DATA_TOKENIZER_FILE) {
        (void)error_set(ERROR_USER,
                        "%s: text that was not tokenized, but model.tokenizer is not \"bytes\"",
                        path);
        return error_hint("set model.tokenizer = \"bytes\", or name token files or shards");
    }
    if (c->vocab_size < TOKENIZER_BYTES_VOCABULARY)
        return error_set(ERROR_USER,
                         "tokenizer \"bytes\" needs a vocabulary of at least %d ids (256 bytes and "
                         "the end of a document), the model's vocab_size is %" PRIu64,
                         TOKENIZER_BYTES_VOCABULARY, c->vocab_size);
    return 0;
}

/* Names and kinds of all sources before any is read: what is wrong with the list is said at once.
 */
static int list_sources(struct source_list *list, const char *const *paths, size_t n,
                        enum data_format format)
{
    list->sources = calloc(n ? n : 1, sizeof *list->sources);
    list->token_first = calloc(n + 1, sizeof *list->token_first);
    list->sample_first = calloc(n + 1, sizeof *list->sample_first);
    CHECK(list->sources != NULL && list->token_first != NULL && list->sample_first != NULL);
    for (size_t i = 0; i < n; i++) {
        struct data_source *s = &list->sources[i];
        s->path = strdup(paths[i]);
        CHECK(s->path != NULL);
        list->n++;
        if (data_source_detect(s->path, format, &s->kind) < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

/* What cannot be in one run: shards see a token further, bytes have ids of their own. */
static int family_of(enum data_source_kind kind)
{
    return data_source_is_shard(kind) ? 0 : data_source_is_text(kind) ? 1 : 2;
}

static int check_one_format(const struct source_list *list, const struct data_source *first)
{
    for (size_t i = 0; i < list->n; i++) {
        const struct data_source *s = &list->sources[i];
        if (family_of(s->kind) == family_of(first->kind))
            continue;
        return error_set(ERROR_USER, "text and token shards in one run: %s is %s, %s is %s",
                         first->path, data_source_kind_name(first->kind), s->path,
                         data_source_kind_name(s->kind));
    }
    return 0;
}

/* A stream that is cut to its end is cut like a document. */
static void count_packed(struct source_list *list, const struct data *d)
{
    uint64_t n = list->token_first[list->n], seq_len = d->reading.seq_len;
    uint64_t extra = d->window - seq_len; /* tokens seen beyond those that are inputs */
    if (d->keep_partial)
        list->samples = data_index_pieces(list->sources[0].kind, n, seq_len);
    else
        list->samples = n < d->window ? 0 : (n - extra) / seq_len;
    uint64_t seen = list->samples ? list->samples * seq_len + extra : 0;
    list->dropped = seen < n ? n - seen : 0;
}

static int no_sample_error(const struct source_list *list, const struct data *d)
{
    uint64_t documents = 0, overlong = 0;
    for (size_t i = 0; i < list->n; i++) {
        documents += list->sources[i].documents;
        overlong += list->sources[i].overlong;
    }
    if (overlong > 0 && d->reading.drop_overlong)
        return error_set(ERROR_USER,
                         "%s%s: no sample is left: %" PRIu64 " of %" PRIu64
                         " conversations are longer than training.seq_len = %" PRIu64
                         " and left out (data.overlong = \"drop\")",
                         list->sources[0].path, list->n > 1 ? " and others" : "", overlong,
                         documents, d->reading.seq_len);
    return error_set(ERROR_USER,
                     "%s%s: too little data for one sample: %" PRIu64 " tokens in %" PRIu64
                     " documents, a sample takes %" PRIu64 " (training.seq_len = %" PRIu64 ")",
                     list->sources[0].path, list->n > 1 ? " and others" : "",
                     list->token_first[list->n], documents,
                     !d->indexed && !d->keep_partial ? d->window : 2, d->reading.seq_len);
}

static int open_sources(struct data *d, struct source_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        struct data_source *s = &list->sources[i];
        if (data_source_open(s, &d->reading) < 0)
            return -(int)error_kind_now();
        if (d->packing && data_source_is_instruction(s))
            d->reading.pack_whole = true;
        list->token_first[i + 1] = list->token_first[i] + s->tokens;
    }
    return 0;
}

/* All sources are open: it is known whether samples are cut out of the stream. */
static int count_samples(struct data *d, struct source_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        struct data_source *s = &list->sources[i];
        if (d->indexed && data_index_open(s, &d->reading) < 0)
            return -(int)error_kind_now();
        list->sample_first[i + 1] = list->sample_first[i] + s->pieces;
    }
    if (!d->indexed)
        count_packed(list, d);
    else
        list->samples = list->sample_first[list->n];
    return list->n > 0 && list->samples == 0 ? no_sample_error(list, d) : 0;
}

/* The last val_fraction of the samples, rounded down, but at least one when any was asked for. */
static int hold_out(struct data *d)
{
    uint64_t n = d->train.samples;
    d->held_out = (uint64_t)((double)n * d->val_fraction);
    if (d->val_fraction > 0.0 && d->held_out == 0)
        d->held_out = 1;
    if (d->held_out >= n)
        return error_set(ERROR_USER,
                         "data.val_fraction = %g of %" PRIu64 " samples leaves none to train on",
                         d->val_fraction, n);
    d->train_samples = n - d->held_out;
    return 0;
}

static void prepare(struct data *d, const struct data_config *c, enum data_source_kind kind)
{
    d->text = data_source_is_text(kind);
    if (d->text)
        d->reading.eos_id = TOKENIZER_BYTES_END;
    d->window = c->seq_len + (data_source_is_shard(kind) ? 1 : 0);
    d->raw = malloc(d->window * 4);
    d->tokens = malloc(d->window * sizeof *d->tokens);
    d->ends = malloc(d->window);
    d->masked = calloc(d->window, 1);
    CHECK(d->raw != NULL && d->tokens != NULL && d->ends != NULL && d->masked != NULL);
}

static int open_all(struct data *d, const struct data_config *c)
{
    if (check_config(c) < 0 || list_sources(&d->train, c->train, c->n_train, c->format) < 0 ||
        list_sources(&d->validation, c->validation, c->n_validation, c->format) < 0)
        return -(int)error_kind_now();
    const struct data_source *first = &d->train.sources[0];
    if (check_one_format(&d->train, first) < 0 || check_one_format(&d->validation, first) < 0)
        return -(int)error_kind_now();
    if (data_source_is_text(first->kind) && check_tokenizer(c, first->path) < 0)
        return -(int)error_kind_now();
    prepare(d, c, first->kind);
    if (folder_create(c->cache_dir) < 0)
        return error_wrap("[data] cache_dir");
    if (open_sources(d, &d->train) < 0 || open_sources(d, &d->validation) < 0)
        return -(int)error_kind_now();
    d->indexed = !d->packing || d->reading.pack_whole;
    if (count_samples(d, &d->train) < 0 || count_samples(d, &d->validation) < 0)
        return -(int)error_kind_now();
    return hold_out(d);
}

int data_open(struct data **out, const struct data_config *c, data_progress_fn *progress,
              void *progress_arg)
{
    struct data *d = calloc(1, sizeof *d);
    CHECK(d != NULL && c->cache_dir != NULL);
    d->reading = (struct data_reading){.cache_dir = strdup(c->cache_dir),
                                       .vocab_size = c->vocab_size,
                                       .eos_id = c->eos_id,
                                       .seq_len = c->seq_len,
                                       .drop_overlong = c->drop_overlong,
                                       .progress = progress,
                                       .progress_arg = progress_arg};
    d->seed = c->seed;
    d->val_fraction = c->val_fraction;
    d->packing = c->packing;
    d->shuffle = c->shuffle;
    d->keep_partial = c->keep_partial;
    for (size_t i = 0; i < OPEN_FILES_MAX; i++)
        d->files[i].fd = -1;
    int rc = open_all(d, c);
    if (rc < 0) {
        data_close(d);
        return rc;
    }
    *out = d;
    return 0;
}

static void close_list(struct source_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        data_source_close(&list->sources[i]);
    free(list->sources);
    free(list->token_first);
    free(list->sample_first);
}

void data_close(struct data *d)
{
    if (d == NULL)
        return;
    for (size_t i = 0; i < OPEN_FILES_MAX; i++)
        if (d->files[i].fd >= 0)
            (void)close(d->files[i].fd); /* opened for reading */
    close_list(&d->train);
    close_list(&d->validation);
    free(d->raw);
    free(d->tokens);
    free(d->ends);
    free(d->masked);
    free((char *)(uintptr_t)d->reading.cache_dir); /* strdup in data_open */
    free(d);
}

/* ---- reading ---- */

/*
 * A cache file is never changed in place but for its header's times, so its inode tells; a shard is
 * the user's, so its time does.
 */
static int same_file(const struct data_identity *a, const struct data_identity *b, bool cached)
{
    return a->size == b->size &&
           (cached ? a->inode == b->inode && a->device == b->device : a->mtime_ns == b->mtime_ns);
}

static int find_open(const struct data *d, const char *path)
{
    for (size_t i = 0; i < OPEN_FILES_MAX; i++)
        if (d->files[i].fd >= 0 && d->files[i].path == path)
            return d->files[i].fd;
    return -1;
}

/* A place for a file that is to be opened; what was there longest is closed. */
static struct open_file *displace(struct data *d, const char *path)
{
    struct open_file *f = &d->files[d->next_file];
    d->next_file = (d->next_file + 1) % OPEN_FILES_MAX;
    if (f->fd >= 0)
        (void)close(f->fd); /* opened for reading */
    *f = (struct open_file){path, -1};
    return f;
}

/* The descriptor of a source's file, opened at the first use and again after it was displaced. */
static int open_file(struct data *d, const char *path, const struct data_identity *identity,
                     bool cached)
{
    struct stat status;
    int known = find_open(d, path);
    if (known >= 0)
        return known;
    struct open_file *f = displace(d, path);
    f->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0)
        return error_set(ERROR_FAILED, "%s: cannot open again: %s", path, strerror(errno));
    if (fstat(f->fd, &status) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", path, strerror(errno));
    struct data_identity now = data_identity_of(&status);
    if (!same_file(&now, identity, cached)) {
        (void)close(f->fd); /* opened for reading */
        f->fd = -1;
        return error_set(ERROR_FAILED, "%s: the file changed since the run started", path);
    }
    return f->fd;
}

static int open_checks(struct data *d, const struct data_source *s)
{
    int known = find_open(d, s->checks_path);
    if (known >= 0)
        return known;
    struct open_file *f = displace(d, s->checks_path);
    f->fd = data_source_open_checks(s);
    return f->fd;
}

/* Both files of a source. What is opened second may displace the first, but not the other way
 * round: the place after the newest is the oldest. */
static int open_source(struct data *d, const struct data_source *s, struct data_source_files *files)
{
    bool cached = !data_source_is_shard(s->kind);
    for (int i = 0; i < 2; i++) {
        files->fd = open_file(d, s->token_path, &s->tokens_identity, cached);
        files->checks_fd = files->fd < 0 ? -1 : open_checks(d, s);
        if (files->checks_fd < 0)
            return -(int)error_kind_now();
    }
    return 0;
}

/* The largest i with first[i] <= number; first ascends over n + 1 entries. */
static size_t find_source(const uint64_t *first, size_t n, uint64_t number)
{
    size_t low = 0, high = n;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (first[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A word of a token file taken apart into the window's arrays. */
static bool take_word(struct data *d, uint64_t at)
{
    uint32_t word = (uint32_t)d->tokens[at];
    d->tokens[at] = (int32_t)(word & TOKEN_FILE_ID);
    d->masked[at] = (word & TOKEN_FILE_MASKED) != 0;
    return (word & TOKEN_FILE_END) != 0;
}

/* tokens, ends and masked (n) of [start, start + n) in one source. */
static int read_tokens(struct data *d, const struct data_source *s, uint64_t start, uint64_t n,
                       uint64_t at)
{
    struct data_source_files files;
    if (open_source(d, s, &files) < 0 || data_source_read(s, &files, start, n, d->raw) < 0)
        return -(int)error_kind_now();
    int32_t *tokens = d->tokens + at;
    data_tokens_widen(d->raw, s->token_bytes, n, tokens);
    for (uint64_t i = 0; i < n; i++) {
        bool ends =
            s->kind == SOURCE_TOKENS ? take_word(d, at + i) : tokens[i] == d->reading.eos_id;
        if ((uint64_t)(uint32_t)tokens[i] >= d->reading.vocab_size)
            return error_set(ERROR_FAILED,
                             "%s: token %" PRIu64 " has id %u, expected less than vocab_size = "
                             "%" PRIu64 "; the file changed since the run started",
                             s->token_path, start + i, (uint32_t)tokens[i], d->reading.vocab_size);
        d->ends[at + i] = ends || start + i + 1 == s->tokens;
    }
    return 0;
}

/* Returns the tokens read into the window (fewer than it holds: the stream ends), or negative. */
static int64_t gather_packed(struct data *d, const struct source_list *list, uint64_t index)
{
    uint64_t start = index * d->reading.seq_len, left = list->token_first[list->n] - start;
    uint64_t want = left < d->window ? left : d->window;
    size_t i = find_source(list->token_first, list->n, start);
    for (uint64_t at = 0; at < want; i++) {
        const struct data_source *s = &list->sources[i];
        uint64_t from = start + at - list->token_first[i], rest = s->tokens - from;
        uint64_t n = want - at < rest ? want - at : rest;
        if (read_tokens(d, s, from, n, at) < 0)
            return -(int)error_kind_now();
        at += n;
    }
    return (int64_t)want;
}

static int64_t gather_document(struct data *d, const struct source_list *list, uint64_t index)
{
    size_t i = find_source(list->sample_first, list->n, index);
    const struct data_source *s = &list->sources[i];
    struct data_piece piece;
    int fd = open_file(d, s->index_path, &s->index_identity, true);
    if (fd < 0 ||
        data_index_find(s, fd, index - list->sample_first[i], d->reading.seq_len, &piece) < 0)
        return -(int)error_kind_now();
    uint64_t left = piece.end - piece.start, n = left < d->window ? left : d->window;
    return read_tokens(d, s, piece.start, n, 0) < 0 ? -(int)error_kind_now() : (int64_t)n;
}

/* Tokens (got) of the window -> the arrays (seq_len) of a sample. */
static void fill_sample(const struct data *d, uint64_t got, struct data_sample *s)
{
    uint64_t seq_len = d->reading.seq_len, n = got < seq_len ? got : seq_len, start = 0;
    int32_t padding = d->reading.eos_id < 0 ? 0 : (int32_t)d->reading.eos_id;
    for (uint64_t t = 0; t < seq_len; t++) {
        if (t == n)
            start = n; /* padding is a document of its own */
        bool learned = t < n && t + 1 < got && !d->ends[t] && !d->masked[t + 1];
        s->tokens[t] = t < n ? d->tokens[t] : padding;
        s->labels[t] = learned ? d->tokens[t + 1] : DATA_NO_LABEL;
        s->document_start[t] = (int32_t)start;
        s->position[t] = (int32_t)(t - start);
        if (t < n && d->ends[t])
            start = t + 1;
    }
}

uint64_t data_samples(const struct data *d, enum data_set set)
{
    if (set == DATA_TRAIN)
        return d->train_samples;
    return d->validation.n > 0 ? d->validation.samples : d->held_out;
}

int data_read_sample(struct data *d, enum data_set set, uint64_t q, struct data_sample *sample)
{
    uint64_t n = data_samples(d, set);
    CHECK(n > 0);
    uint64_t index = q % n;
    const struct source_list *list = &d->train;
    if (set == DATA_TRAIN) {
        if (d->shuffle)
            index = random_permute(d->seed, q / n, n, index);
    } else if (d->validation.n > 0) {
        list = &d->validation;
    } else {
        index += d->train_samples;
    }
    int64_t got = d->indexed ? gather_document(d, list, index) : gather_packed(d, list, index);
    if (got < 0)
        return error_wrap("data, sample %" PRIu64, q);
    fill_sample(d, (uint64_t)got, sample);
    return 0;
}

/* ---- telling ---- */

struct printer {
    char *text;
    size_t capacity, used;
};

__attribute__((format(printf, 2, 3))) static void print(struct printer *p, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t room = p->used < p->capacity ? p->capacity - p->used : 0;
    int n = vsnprintf(room ? p->text + p->used : NULL, room, format, arguments);
    va_end(arguments);
    p->used += n > 0 ? (size_t)n : 0;
}

/* What became of documents, summed over a list. */
struct totals {
    uint64_t documents, skipped, unlearnable, unlabelled, overlong, labels;
};

static struct totals sum_up(const struct source_list *list)
{
    struct totals t = {0};
    for (size_t i = 0; i < list->n; i++) {
        const struct data_source *s = &list->sources[i];
        t.documents += s->documents;
        t.skipped += s->skipped;
        t.overlong += s->overlong;
        if (data_source_is_instruction(s))
            t.unlabelled += s->token_file.unlabelled + s->unlearnable;
        else
            t.unlearnable += s->unlearnable;
        t.labels += s->token_file.labels; /* 0 of other kinds */
    }
    return t;
}

/* A token file is called by what it was made of, and says what that was taken for. */
static void describe_source(struct printer *p, const struct data_source *s)
{
    if (s->kind == SOURCE_TOKENS)
        print(p, "%s as %s", s->token_file.source, s->token_file.taken_as);
    else
        print(p, "%s", s->path);
}

static const char *arrangement(const struct data *d)
{
    if (!d->packing)
        return ", one document each";
    return d->indexed ? ", packed, no conversation cut" : ", packed";
}

static void describe_left_out(struct printer *p, const struct data *d,
                              const struct source_list *list, const char *name)
{
    struct totals t = sum_up(list);
    if (list->dropped > 0)
        print(p, "%s: the last %" PRIu64 " tokens fill no sample and are left out\n", name,
              list->dropped);
    if (t.skipped > 0)
        print(p, "%s: %" PRIu64 " blank lines or empty texts skipped\n", name, t.skipped);
    if (t.unlearnable > 0)
        print(p, "%s: %" PRIu64 " documents of one token left out: nothing to predict\n", name,
              t.unlearnable);
    if (t.overlong > 0)
        print(p, "%s: %" PRIu64 " conversations longer than %" PRIu64 " tokens %s\n", name,
              t.overlong, d->reading.seq_len,
              d->reading.drop_overlong ? "left out (data.overlong)" : "truncated (data.overlong)");
    if (t.unlabelled > 0)
        print(p, "%s: %" PRIu64 " conversations left out: nothing in them is learned\n", name,
              t.unlabelled);
}

static void describe_list(struct printer *p, const struct data *d, const struct source_list *list,
                          const char *name)
{
    struct totals t = sum_up(list);
    print(p, "%s: %zu file%s (", name, list->n, list->n == 1 ? "" : "s");
    for (size_t i = 0; i < list->n && i < DESCRIBE_FILES_MAX; i++) {
        print(p, "%s", i ? ", " : "");
        describe_source(p, &list->sources[i]);
    }
    print(p, "%s), %s", list->n > DESCRIBE_FILES_MAX ? ", ..." : "",
          data_source_kind_name(list->sources[0].kind));
    if (list->sources[0].kind == SOURCE_TOKENS)
        print(p, " by %s", list->sources[0].token_file.made_by);
    print(p, ": %" PRIu64 " documents, %" PRIu64 " tokens, ", t.documents,
          list->token_first[list->n]);
    if (list->sources[0].kind == SOURCE_TOKENS)
        print(p, "%" PRIu64 " of them learned, ", t.labels);
    print(p, "%" PRIu64 " samples of %" PRIu64 "%s\n", list->samples, d->reading.seq_len,
          arrangement(d));
    describe_left_out(p, d, list, name);
}

size_t data_describe(const struct data *d, char *text, size_t capacity)
{
    struct printer p = {text, capacity, 0};
    if (capacity > 0)
        text[0] = '\0';
    describe_list(&p, d, &d->train, "train");
    if (d->validation.n > 0)
        describe_list(&p, d, &d->validation, "validation");
    else if (d->held_out > 0)
        print(&p, "validation: the last %" PRIu64 " samples of train, %" PRIu64 " are trained\n",
              d->held_out, d->train_samples);
    return p.used;
}

static void hash_list(XXH3_state_t *state, const struct source_list *list)
{
    uint64_t n = list->n;
    CHECK(XXH3_128bits_update(state, &n, sizeof n) == XXH_OK);
    for (size_t i = 0; i < list->n; i++) {
        uint64_t kind = list->sources[i].kind;
        if (data_source_is_instruction(&list->sources[i]))
            kind |= (uint64_t)TOKEN_FILE_INSTRUCTION << 32;
        CHECK(XXH3_128bits_update(state, &kind, sizeof kind) == XXH_OK);
        CHECK(XXH3_128bits_update(state, list->sources[i].hash, sizeof list->sources[i].hash) ==
              XXH_OK);
    }
}

void data_fingerprint(const struct data *d, uint64_t hash[2])
{
    uint64_t fraction;
    memcpy(&fraction, &d->val_fraction, sizeof fraction);
    const uint64_t keys[] = {FINGERPRINT_VERSION,
                             d->packing,
                             d->shuffle,
                             d->keep_partial,
                             d->reading.seq_len,
                             (uint64_t)d->reading.eos_id,
                             d->seed,
                             fraction,
                             d->reading.pack_whole,
                             d->reading.drop_overlong};
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    CHECK(XXH3_128bits_update(state, keys, sizeof keys) == XXH_OK);
    if (d->text)
        CHECK(XXH3_128bits_update(state, TOKENIZER_BYTES_NAME, sizeof TOKENIZER_BYTES_NAME) ==
              XXH_OK);
    hash_list(state, &d->train);
    XXH128_hash_t h = XXH3_128bits_digest(state);
    hash[0] = h.low64;
    hash[1] = h.high64;
    (void)XXH3_freeState(state); /* cannot fail */
}
