#include "model/config_dtype.h"

#include <stdlib.h>
#include <string.h>

#include "model/json.h"
#include "procs/check.h"
#include "procs/error.h"

/* What is written: pieces of the old text and new values between them. */
struct rewriting {
    const char *json;
    size_t n;
    const char *name; /* of the dtype */
    char *out;
    size_t used, copied; /* bytes of out, of json */
    int replaced;
};

static void put(struct rewriting *r, const char *text, size_t n)
{
    memcpy(r->out + r->used, text, n);
    r->used += n;
}

/* End of the string that begins at json[i] == '"': one past its closing quote. */
static size_t string_end(const char *json, size_t i)
{
    for (i++; json[i] != '"'; i++)
        if (json[i] == '\\')
            i++;
    return i + 1;
}

static size_t skip_space(const char *json, size_t i)
{
    while (json[i] == ' ' || json[i] == '\t' || json[i] == '\n' || json[i] == '\r')
        i++;
    return i;
}

static int is_dtype_key(const char *key, size_t n)
{
    return (n == 13 && memcmp(key, "\"torch_dtype\"", 13) == 0) ||
           (n == 7 && memcmp(key, "\"dtype\"", 7) == 0);
}

/* The value of a dtype key: a string, or null. Returns its end. */
static size_t replace_value(struct rewriting *r, size_t i)
{
    size_t after = r->json[i] == '"' ? string_end(r->json, i) : i + strlen("null");
    put(r, r->json + r->copied, i - r->copied);
    put(r, "\"", 1);
    put(r, r->name, strlen(r->name));
    put(r, "\"", 1);
    r->copied = after;
    r->replaced = 1;
    return after;
}

/* Walks the text, known to be an object: only strings and nesting need to be told apart. */
static void rewrite(struct rewriting *r)
{
    int depth = 0;
    for (size_t i = 0; i < r->n;) {
        char c = r->json[i];
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (c != '"') {
            i++;
            continue;
        }
        size_t after = string_end(r->json, i), colon = skip_space(r->json, after);
        int is_key = depth == 1 && r->json[colon] == ':';
        if (is_key && is_dtype_key(r->json + i, after - i))
            i = replace_value(r, skip_space(r->json, colon + 1));
        else
            i = after;
    }
}

static void add_key(struct rewriting *r, int empty)
{
    size_t brace = (size_t)((const char *)memchr(r->json, '{', r->n) - r->json);
    put(r, r->json, brace + 1);
    static const char key[] = "\n  \"torch_dtype\": \"";
    put(r, key, sizeof key - 1);
    put(r, r->name, strlen(r->name));
    put(r, empty ? "\"\n" : "\",", 2);
    r->copied = brace + 1;
}

int model_config_set_dtype(const char *json, size_t n, enum model_dtype dtype, char **out,
                           size_t *n_out)
{
    json_t *root;
    if (model_json_parse(&root, json, n, "config.json") < 0)
        return -(int)error_kind_now();
    int empty = json_object_size(root) == 0;
    json_decref(root);
    struct rewriting r = {.json = json, .n = n, .name = model_dtype_torch_name(dtype)};
    CHECK(r.name != NULL);
    r.out = malloc(n + 128); /* two values of at most 10 letters and a key */
    if (r.out == NULL)
        return error_set(ERROR_FAILED, "no memory for a config.json of %zu bytes", n);
    rewrite(&r);
    if (!r.replaced)
        add_key(&r, empty);
    put(&r, json + r.copied, n - r.copied);
    *out = r.out;
    *n_out = r.used;
    return 0;
}
