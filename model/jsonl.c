#include "model/jsonl.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "procs/check.h"
#include "procs/error.h"

/* A jsonl_text is jansson's string value: the decoded text is not copied again. */

#define KEYS_TEXT_BYTES 160

/* INT_AS_REAL: a number too large for 64 bits in a key that nobody reads is no reason to stop. */
#define JSON_FLAGS                                                                                 \
    (JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL)

static const char *type_name(const json_t *value)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "a number", [JSON_REAL] = "a number",  [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",      [JSON_NULL] = "null",
    };
    return names[json_typeof(value)];
}

static int missing_text_error(json_t *object)
{
    char keys[KEYS_TEXT_BYTES] = "";
    size_t used = 0;
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        int n = snprintf(keys + used, sizeof keys - used, "%s\"%s\"", used ? ", " : "", key);
        if (n < 0 || (size_t)n >= sizeof keys - used) {
            keys[used] = '\0';
            break;
        }
        used += (size_t)n;
    }
    return error_set(ERROR_USER, "expected a key \"text\", found %s%s",
                     used ? "only " : "an empty object", keys);
}

int jsonl_text_parse(const char *line, size_t n, struct jsonl_text **document)
{
    json_error_t e;
    int rc = 0;
    json_t *text = NULL;
    json_t *root = json_loadb(line, n, JSON_FLAGS, &e);
    if (root == NULL)
        return error_set(ERROR_USER, "expected a JSON object, found an error at column %d: %s",
                         e.column, e.text);
    if (!json_is_object(root)) {
        rc = error_set(ERROR_USER, "expected an object {\"text\": \"...\"}, found %s",
                       type_name(root));
        goto cleanup;
    }
    text = json_object_get(root, "text");
    if (text == NULL) {
        rc = missing_text_error(root);
        goto cleanup;
    }
    if (!json_is_string(text)) {
        rc = error_set(ERROR_USER, "expected \"text\" to be a string, found %s", type_name(text));
        goto cleanup;
    }
    *document = (struct jsonl_text *)json_incref(text);
cleanup:
    json_decref(root);
    return rc;
}

int jsonl_object_check(const char *line, size_t n)
{
    json_error_t e;
    json_t *root = json_loadb(line, n, JSON_REJECT_DUPLICATES, &e); /* at the root: no other type */
    int rc = json_is_object(root) ? 0
             : root
                 ? error_set(ERROR_USER, "expected a JSON object, found %s", type_name(root))
                 : error_set(ERROR_USER, "expected a JSON object, found an error at column %d: %s",
                             e.column, e.text);
    json_decref(root);
    return rc;
}

const char *jsonl_text_bytes(const struct jsonl_text *document, size_t *n)
{
    const json_t *text = (const json_t *)document;
    *n = json_string_length(text);
    return json_string_value(text);
}

void jsonl_text_free(struct jsonl_text *document)
{
    json_decref((json_t *)document);
}
