#include "launcher/tokenizing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "launcher/machine.h"
#include "launcher/tokenizer_child.h"
#include "model/token_file.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/printable.h"

enum {
    NAME_BYTES_MAX = 64, /* of the source's own name, at the front of its token file's */
    READ_BYTES = 1 << 16,
};
#define RACY_NS 2000000000u /* as io_worker/data_cache.h's */
#define TOKENIZING_RULE                                                                            \
    "tokenizing 1" /* changes with what tools/tokenizer makes of the same input */

struct tokenizing {
    struct launcher *l;
    const char *kept;
    struct tokenizer_place place;
    char tokenizer[LAUNCHER_PATH_BYTES], cache[LAUNCHER_PATH_BYTES];
    uint8_t key[TOKEN_FILE_KEY_BYTES];
    char *job; /* for the child: name=value, each with its NUL */
    size_t job_bytes;
    FILE *job_text;  /* writes it */
    uint64_t wanted; /* sources in it */
};

void tokenizing_cache(const struct config *config, char out[LAUNCHER_PATH_BYTES])
{
    if (*config->data_cache_dir)
        (void)snprintf(out, LAUNCHER_PATH_BYTES, "%s", config->data_cache_dir);
    else
        (void)snprintf(out, LAUNCHER_PATH_BYTES, "%.4000s/cache", config->run_output_dir);
}

static int ends_with(const char *path, const char *suffix)
{
    size_t n = strlen(path), m = strlen(suffix);
    return n >= m && strcmp(path + n - m, suffix) == 0;
}

/* What is for the child; io_worker reads the rest as it is, or refuses it. */
static int is_text(const struct config *c, const char *path)
{
    if (c->data_format == CONFIG_FORMAT_TOKENS || ends_with(path, TOKEN_FILE_SUFFIX))
        return 0;
    return c->data_format != CONFIG_FORMAT_AUTO || ends_with(path, ".txt") ||
           ends_with(path, ".jsonl") || ends_with(path, ".parquet");
}

/* NULL: there is none. */
static const char *first_text(const struct config *c)
{
    for (size_t i = 0; i < c->data_train.count; i++)
        if (is_text(c, c->data_train.items[i]))
            return c->data_train.items[i];
    for (size_t i = 0; i < c->data_validation.count; i++)
        if (is_text(c, c->data_validation.items[i]))
            return c->data_validation.items[i];
    return NULL;
}

/* -- the key -- */

/* A file's name, length and bytes; one that is absent counts as absent. */
static void hash_file(XXH3_state_t *state, const char *directory, const char *name)
{
    char path[LAUNCHER_PATH_BYTES + NAME_MAX + 2];
    static uint8_t bytes[READ_BYTES];
    uint64_t total = 0;
    (void)snprintf(path, sizeof path, "%s/%s", directory, name);
    (void)XXH3_128bits_update(state, name, strlen(name) + 1); /* cannot fail */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n;
    while (fd >= 0 && (n = read(fd, bytes, sizeof bytes)) > 0) {
        (void)XXH3_128bits_update(state, bytes, (size_t)n); /* cannot fail */
        total += (uint64_t)n;
    }
    if (fd >= 0)
        (void)close(fd); /* read only */
    else
        total = UINT64_MAX;
    (void)XXH3_128bits_update(state, &total, sizeof total); /* cannot fail */
}

static int is_template(const struct dirent *e)
{
    return ends_with(e->d_name, ".jinja");
}

static void hash_templates(XXH3_state_t *state, const char *folder)
{
    char directory[LAUNCHER_PATH_BYTES + 32];
    struct dirent **found = NULL;
    (void)snprintf(directory, sizeof directory, "%s/additional_chat_templates", folder);
    int n = scandir(directory, &found, is_template, alphasort); /* -1: there is none */
    for (int i = 0; i < n; i++) {
        hash_file(state, directory, found[i]->d_name);
        free(found[i]);
    }
    free(found);
}

static void make_key(struct tokenizing *t)
{
    static const char *const names[] = {"tokenizer_config.json", "special_tokens_map.json",
                                        "chat_template.jinja"};
    const struct config *c = &t->l->config;
    const struct model_config *model = &t->l->layout.config;
    char copy[LAUNCHER_PATH_BYTES], name[LAUNCHER_PATH_BYTES];
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    (void)snprintf(copy, sizeof copy, "%s", t->tokenizer);
    (void)snprintf(name, sizeof name, "%s", t->tokenizer);
    const char *folder = dirname(copy);
    (void)XXH3_128bits_update(state, TOKENIZING_RULE, sizeof TOKENIZING_RULE); /* cannot fail */
    hash_file(state, t->place.program, "requirements.txt");
    hash_file(state, folder, basename(name));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        hash_file(state, folder, names[i]);
    hash_templates(state, folder);
    int64_t settings[] = {c->data_format, model->n_eos ? (int64_t)model->eos_token_id[0] : -1};
    (void)XXH3_128bits_update(state, settings, sizeof settings); /* cannot fail */
    XXH128_canonical_t key;
    XXH128_canonicalFromHash(&key, XXH3_128bits_digest(state));
    _Static_assert(sizeof key == TOKEN_FILE_KEY_BYTES, "the key is an xxh3-128");
    memcpy(t->key, &key, sizeof key);
    (void)XXH3_freeState(state); /* cannot fail */
}

/* -- the cache -- */

static void file_name(const struct tokenizing *t, const char *cache, const char *source,
                      char out[LAUNCHER_PATH_BYTES + 128])
{
    char absolute[PATH_MAX], copy[PATH_MAX], key[17];
    const char *whole = realpath(source, absolute) ? absolute : source;
    (void)snprintf(copy, sizeof copy, "%s", whole);
    for (size_t i = 0; i < 8; i++)
        (void)snprintf(key + 2 * i, 3, "%02x", t->key[i]);
    (void)snprintf(out, LAUNCHER_PATH_BYTES + 128, "%s/%.*s-%016llx-%s%s", cache, NAME_BYTES_MAX,
                   basename(copy), (unsigned long long)XXH3_64bits(whole, strlen(whole)), key,
                   TOKEN_FILE_SUFFIX);
}

static uint64_t nanoseconds(const struct timespec *at)
{
    return (uint64_t)at->tv_sec * 1000000000u + (uint64_t)at->tv_nsec;
}

/* Is it certainly of the source as it is now, and of this key? */
static int holds(const struct tokenizing *t, const char *path, const char *source)
{
    struct token_file_header h;
    struct stat now;
    if (!token_file_load(path, &h) || memcmp(h.key, t->key, sizeof h.key) != 0 ||
        stat(source, &now) < 0)
        return 0;
    uint64_t youngest = h.mtime_ns > h.ctime_ns ? h.mtime_ns : h.ctime_ns;
    return h.device == now.st_dev && h.inode == now.st_ino && h.size == (uint64_t)now.st_size &&
           h.mtime_ns == nanoseconds(&now.st_mtim) && h.ctime_ns == nanoseconds(&now.st_ctim) &&
           h.scanned_ns >= youngest + RACY_NS;
}

/* What the plan names for one source: an allocated path. */
static char *resolve(struct tokenizing *t, const char *source)
{
    char path[LAUNCHER_PATH_BYTES + 128], *out;
    int found = 0;
    if (!is_text(&t->l->config, source)) {
        (void)snprintf(path, sizeof path, "%s", source);
        found = 1;
    } else if (t->kept) {
        file_name(t, t->kept, source, path);
        found = holds(t, path, source);
    }
    if (!found) {
        file_name(t, t->cache, source, path);
        found = holds(t, path, source);
    }
    if (!found) {
        t->wanted++;
        (void)fprintf(t->job_text, "source=%s%coutput=%s%c", source, 0, path, 0);
    }
    out = strdup(path);
    CHECK(out != NULL);
    return out;
}

static void resolve_all(struct tokenizing *t, const struct config_strings *sources,
                        struct config_strings *out)
{
    out->items = calloc(sources->count + 1, sizeof *out->items);
    CHECK(out->items != NULL);
    for (size_t i = 0; i < sources->count; i++) {
        out->items[i] = resolve(t, sources->items[i]);
        out->count++;
    }
}

/* -- the job -- */

int tokenizing_find_tokenizer(const struct config *c, char out[LAUNCHER_PATH_BYTES])
{
    if (*c->model_tokenizer)
        (void)snprintf(out, LAUNCHER_PATH_BYTES, "%s", c->model_tokenizer);
    else
        (void)snprintf(out, LAUNCHER_PATH_BYTES, "%.4000s/tokenizer.json", c->model_path);
    if (access(out, R_OK) == 0)
        return 0;
    (void)error_set(ERROR_USER, "there is no tokenizer for it: %s: %s", out, strerror(errno));
    return error_hint("set model.tokenizer to a tokenizer.json, or to \"bytes\"; or name token "
                      "shards as data");
}

static void begin_job(struct tokenizing *t)
{
    static const char *const formats[] = {
        [CONFIG_FORMAT_AUTO] = "auto",
        [CONFIG_FORMAT_TEXT] = "text",
        [CONFIG_FORMAT_PROMPT_COMPLETION] = "prompt-completion",
        [CONFIG_FORMAT_CHAT] = "chat",
    };
    const struct model_config *model = &t->l->layout.config;
    char eos[24] = "";
    t->job_text = open_memstream(&t->job, &t->job_bytes);
    CHECK(t->job_text != NULL);
    if (model->n_eos)
        (void)snprintf(eos, sizeof eos, "%" PRId64, (int64_t)model->eos_token_id[0]);
    (void)fprintf(t->job_text, "mode=files%ctokenizer=%s%ceos=%s%cformat=%s%cworkers=%u%ckey=", 0,
                  t->tokenizer, 0, eos, 0, formats[t->l->config.data_format], 0, machine_cores(),
                  0);
    for (size_t i = 0; i < sizeof t->key; i++)
        (void)fprintf(t->job_text, "%02x", t->key[i]);
    (void)fputc(0, t->job_text);
}

/* The child said that all is done; what it left is looked at once more. */
static int check_made(const struct tokenizing *t, const struct config_strings *sources,
                      const struct config_strings *made)
{
    struct token_file_header h;
    for (size_t i = 0; i < made->count; i++)
        if (is_text(&t->l->config, sources->items[i]) && !token_file_load(made->items[i], &h))
            return error_set(ERROR_FAILED, "%s: the tokenizer left no whole file there",
                             made->items[i]);
    return 0;
}

static int tokenize(struct tokenizing *t)
{
    struct launcher *l = t->l;
    const struct config *c = &l->config;
    if (tokenizing_find_tokenizer(c, t->tokenizer) < 0)
        return error_wrap("%s: text", first_text(c));
    if (tokenizer_place(&t->place) < 0)
        return -(int)error_kind_now();
    tokenizing_cache(c, t->cache);
    make_key(t);
    begin_job(t);
    tokenizing_close(l);
    resolve_all(t, &c->data_train, &l->tokenized.train);
    resolve_all(t, &c->data_validation, &l->tokenized.validation);
    CHECK(fclose(t->job_text) == 0); /* memory */
    if (t->wanted == 0)
        return 0;
    if (tokenizer_check(&t->place) < 0 ||
        tokenizer_run(l, &t->place, t->job, t->job_bytes, NULL) < 0 ||
        check_made(t, &c->data_train, &l->tokenized.train) < 0)
        return -(int)error_kind_now();
    return check_made(t, &c->data_validation, &l->tokenized.validation);
}

int tokenizing_run(struct launcher *l, const char *kept)
{
    if (strcmp(l->config.model_tokenizer, "bytes") == 0 || !first_text(&l->config))
        return 0;
    struct tokenizing *t = calloc(1, sizeof *t);
    CHECK(t != NULL);
    t->l = l;
    t->kept = kept;
    int rc = tokenize(t);
    free(t->job);
    free(t);
    return rc;
}

static void print_list(const struct config *c, const struct config_strings *sources,
                       const struct config_strings *made)
{
    struct token_file_header h;
    for (size_t i = 0; i < made->count; i++) {
        if (!is_text(c, sources->items[i]) || !token_file_load(made->items[i], &h))
            continue;
        printable_put(sources->items[i], stdout);
        (void)printf(": taken as %s, %" PRIu64 " documents, %" PRIu64 " tokens, %" PRIu64
                     " of them learned",
                     h.taken_as, h.documents, h.tokens, h.labels);
        if (h.skipped)
            (void)printf(", %" PRIu64 " blank lines or empty texts skipped", h.skipped);
        if (h.unlabelled)
            (void)printf(", %" PRIu64 " conversations in which nothing is learned left out",
                         h.unlabelled);
        (void)fputs(": ", stdout);
        printable_put(made->items[i], stdout);
        (void)fputc('\n', stdout);
    }
}

void tokenizing_print(const struct launcher *l)
{
    print_list(&l->config, &l->config.data_train, &l->tokenized.train);
    print_list(&l->config, &l->config.data_validation, &l->tokenized.validation);
}

static void free_strings(struct config_strings *strings)
{
    for (size_t i = 0; i < strings->count; i++)
        free(strings->items[i]);
    free(strings->items);
    *strings = (struct config_strings){0};
}

void tokenizing_close(struct launcher *l)
{
    free_strings(&l->tokenized.train);
    free_strings(&l->tokenized.validation);
}
