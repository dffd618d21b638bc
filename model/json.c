#include "model/json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* Reads exactly `bytes`; a file that shrinks meanwhile is an error, not a shorter text. */
static int read_whole(int fd, char *text, uint64_t bytes, const char *path)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t n = read(fd, text + done, bytes - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set(ERROR_FAILED, "%s: cannot read: %s", path, strerror(errno));
        if (n == 0)
            return error_set(ERROR_FAILED,
                             "%s: expected %" PRIu64 " bytes, found %" PRIu64
                             " (did it change while being read?)",
                             path, bytes, done);
        done += (uint64_t)n;
    }
    return 0;
}

static int load_open(json_t **root, int fd, const char *path, uint64_t bytes_max)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return error_set(ERROR_USER, "%s: expected a regular file", path);
    uint64_t bytes = (uint64_t)st.st_size;
    if (bytes > bytes_max)
        return error_set(ERROR_USER,
                         "%s: expected at most %" PRIu64 " bytes of JSON, found %" PRIu64, path,
                         bytes_max, bytes);
    char *text = malloc(bytes + 1);
    if (!text)
        return error_set(ERROR_FAILED, "%s: no memory for %" PRIu64 " bytes", path, bytes);
    int rc = read_whole(fd, text, bytes, path);
    if (rc == 0)
        rc = model_json_parse(root, text, bytes, path);
    free(text);
    return rc;
}

int model_json_load(json_t **root, const char *path, uint64_t bytes_max)
{
    *root = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO is refused, not waited for */
    if (fd < 0)
        return error_set(ERROR_USER, "%s: cannot open: %s", path, strerror(errno));
    int rc = load_open(root, fd, path, bytes_max);
    (void)close(fd); /* was only read */
    return rc;
}

int model_json_load_in(json_t **root, const char *folder, const char *name, uint64_t bytes_max)
{
    char path[PATH_MAX];
    int fd;
    *root = NULL;
    int rc = model_folder_open(folder, name, &fd);
    if (rc <= 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* fits: it was opened */
    rc = load_open(root, fd, path, bytes_max);
    (void)close(fd); /* was only read */
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
