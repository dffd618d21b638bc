#include "model/tokenizer_file.h"

#include <inttypes.h>
#include <stdio.h>

#include "model/json.h"
#include "procs/error.h"

#define TOKENIZER_BYTES_MAX ((uint64_t)256 << 20) /* the largest known have some 30 MB */
#define TOKENIZER_TEXT_MAX  40                    /* of a token in a message */

struct largest {
    json_int_t id; /* -1: no token yet */
    char token[TOKENIZER_TEXT_MAX + 1];
};

static void consider(struct largest *most, const char *token, json_int_t id)
{
    if (id <= most->id)
        return;
    most->id = id;
    (void)snprintf(most->token, sizeof most->token, "%s", token ? token : "?");
}

static int scan_vocabulary(struct largest *most, json_t *vocab)
{
    const char *token;
    json_t *value;
    size_t i;
    if (json_is_object(vocab)) {
        json_object_foreach(vocab, token, value)
        {
            consider(most, token, json_integer_value(value));
        }
        return 0;
    }
    if (!json_is_array(vocab))
        return -1;
    json_array_foreach(vocab, i, value)
    {
        consider(most, json_string_value(json_array_get(value, 0)), (json_int_t)i);
    }
    return 0;
}

static void scan_added(struct largest *most, const json_t *added)
{
    json_t *value;
    size_t i;
    json_array_foreach(added, i, value)
    {
        consider(most, json_string_value(json_object_get(value, "content")),
                 json_integer_value(json_object_get(value, "id")));
    }
}

static int check_ids(const char *path, const json_t *root, uint64_t vocab_size)
{
    struct largest most = {.id = -1};
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    if (scan_vocabulary(&most, vocab) < 0) {
        (void)error_set(ERROR_USER,
                        "%s: model.vocab: expected an object or a list of tokens, found %s", path,
                        vocab ? "another value" : "nothing");
        return error_hint("expected a tokenizer.json of the Hugging Face tokenizers library");
    }
    scan_added(&most, json_object_get(root, "added_tokens"));
    if (most.id < 0 || (uint64_t)most.id < vocab_size)
        return 0;
    (void)error_set(ERROR_USER,
                    "%s: token \"%s\" has id %" JSON_INTEGER_FORMAT
                    ", expected less than the model's vocab_size = %" PRIu64,
                    path, most.token, most.id, vocab_size);
    return error_hint("the tokenizer and the model do not belong together");
}

int tokenizer_file_check(const char *path, uint64_t vocab_size)
{
    json_t *root;
    if (model_json_load(&root, path, TOKENIZER_BYTES_MAX) < 0)
        return -(int)error_kind_now();
    int rc = check_ids(path, root, vocab_size);
    json_decref(root);
    return rc;
}
