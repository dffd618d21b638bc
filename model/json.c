#include "model/json.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/folder_file.h"
#include "procs/error.h"

/* Values as jansson will make them, at most: one after each [ { and comma outside of strings. */
static uint64_t count_values(const char *text, uint64_t bytes)
{
    uint64_t n = 1;
    int in_string = 0;
    for (uint64_t i = 0; i < bytes; i++) {
        if (in_string && text[i] == '\\')
            i++; /* what is escaped ends no string */
        else if (text[i] == '"')
            in_string = !in_string;
        else if (!in_string)
            n += text[i] == '[' || text[i] == '{' || text[i] == ',';
    }
    return n;
}

/* What jansson does not look at. */
static int check_text(const char *text, uint64_t bytes, const char *where)
{
    /* no JSON has it; jansson takes one behind a number for its end */
    const char *zero = memchr(text, 0, bytes);
    if (zero) {
        uint64_t line = 1, column = 1;
        for (const char *c = text; c < zero; c++) {
            column = *c == '\n' ? 1 : column + 1;
            line += *c == '\n';
        }
        return error_set(ERROR_USER, "%s:%" PRIu64 ":%" PRIu64 ": not valid JSON: a zero byte",
                         where, line, column);
    }
    uint64_t values = count_values(text, bytes);
    if (values > MODEL_JSON_VALUES_MAX)
        return error_set(ERROR_USER, "%s: expected at most %d values, found up to %" PRIu64, where,
                         MODEL_JSON_VALUES_MAX, values);
    return 0;
}

int model_json_parse(json_t **root, const char *text, uint64_t bytes, const char *where)
{
    json_error_t error;
    *root = NULL;
    int rc = bytes > 0 ? check_text(text, bytes, where) : 0;
    if (rc < 0)
        return rc;
    *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!*root) {
        if (json_error_code(&error) == json_error_out_of_memory)
            return error_set(ERROR_FAILED, "%s: no memory to parse %" PRIu64 " bytes of JSON",
                             where, bytes);
        return error_set(ERROR_USER, "%s:%d:%d: not valid JSON: %s", where, error.line,
                         error.column, error.text);
    }
    if (!json_is_object(*root)) {
        json_decref(*root);
        *root = NULL;
        return error_set(ERROR_USER, "%s:1:1: expected a JSON object {...}", where);
    }
    return 0;
}

int model_json_load(json_t **root, const char *path, uint64_t bytes_max)
{
    char *text;
    uint64_t bytes;
    *root = NULL;
    int rc = model_file_read(path, bytes_max, &text, &bytes);
    if (rc == 0)
        return error_set(ERROR_USER, "%s: cannot open: %s", path, strerror(ENOENT));
    if (rc < 0)
        return rc;
    rc = model_json_parse(root, text, bytes, path);
    free(text);
    return rc;
}

int model_json_load_in(json_t **root, const char *folder, const char *name, uint64_t bytes_max)
{
    char path[PATH_MAX], *text;
    uint64_t bytes;
    *root = NULL;
    int rc = model_folder_read(folder, name, bytes_max, &text, &bytes);
    if (rc <= 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* fits: it was opened */
    rc = model_json_parse(root, text, bytes, path);
    free(text);
    return rc < 0 ? rc : 1;
}

const char *model_json_text(const json_t *value, char text[MODEL_JSON_TEXT_BYTES])
{
    if (!value) {
        (void)snprintf(text, MODEL_JSON_TEXT_BYTES, "nothing");
        return text;
    }
    size_t bytes = json_dumpb(value, text, MODEL_JSON_TEXT_BYTES - 4, JSON_ENCODE_ANY);
    if (bytes > MODEL_JSON_TEXT_BYTES - 4) {
        bytes = MODEL_JSON_TEXT_BYTES - 4;
        memcpy(text + bytes, "...", 3); /* the rest does not matter to a message */
        bytes += 3;
    }
    text[bytes] = '\0';
    return text;
}
