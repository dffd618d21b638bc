#include "io_worker/export.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "io_worker/folder.h"
#include "model/config_dtype.h"
#include "model/folder_file.h"
#include "model/safetensors.h"
#include "model/weights.h"
#include "model/split.h"
#include "procs/check.h"
#include "procs/error.h"
#include "procs/fault.h"

#define CHUNK_ELEMENTS     65536u
#define FLOAT16_MAX        65504.0f
#define COPIED_BYTES_MAX   ((size_t)1 << 30) /* a tokenizer.json is tens of MB */
#define TEMPORARY_SUFFIX   ".tmp"
#define STEP_PREFIX        "step-"
#define CONFIG_NAME        "config.json"
#define DIRECTORY_PATH_MAX (PATH_MAX - 64) /* room for the names below */

/* What save_pretrained() of a model and its tokenizer may have left beside the weights. */
static const char *const copied_files[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
};
#define N_COPIED (sizeof copied_files / sizeof copied_files[0])

struct export
{
    const struct model_layout *layout;
    char *out, *temporary;
    enum model_dtype *dtypes; /* (layout->n_tensors) */
    struct safetensors_writer *writer;
    uint64_t bytes;
    uint64_t next_page;
    int begun;    /* the temporary folder is ours to remove */
    float *chunk; /* (CHUNK_ELEMENTS) f32 */
};

/* ---- folders that are ours ---- */

static int is_weights_file(const char *name)
{
    size_t n = strlen(name), m = strlen(".safetensors");
    return (n > m && strcmp(name + n - m, ".safetensors") == 0) ||
           strcmp(name, "model.safetensors.index.json") == 0;
}

static int is_file_of_export(const char *name)
{
    for (size_t i = 0; i < N_COPIED; i++)
        if (strcmp(name, copied_files[i]) == 0)
            return 1;
    return is_weights_file(name) || strcmp(name, CONFIG_NAME) == 0;
}

static int is_empty_folder(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;
    if (dir == NULL)
        return 0;
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    (void)closedir(dir); /* opened for reading */
    return n == 0;
}

/*
 * Deletes the files that an export has, the marker last, so that an interrupted deletion can be
 * taken up again. Files that somebody else put there stay, and with them the folder.
 */
static int remove_export(const char *path)
{
    char name[PATH_MAX];
    DIR *dir = opendir(path);
    if (dir == NULL)
        return error_set(ERROR_FAILED, "%s: cannot open: %s", path, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(dir)) != NULL;) {
        if (!is_file_of_export(e->d_name))
            continue;
        (void)snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (unlink(name) < 0)
            rc = error_set(ERROR_FAILED, "%s: cannot delete: %s", name, strerror(errno));
    }
    (void)closedir(dir); /* opened for reading */
    if (rc < 0)
        return rc;
    (void)snprintf(name, sizeof name, "%s/%s", path, EXPORT_MARKER);
    if (unlink(name) < 0 && errno != ENOENT)
        return error_set(ERROR_FAILED, "%s: cannot delete: %s", name, strerror(errno));
    if (rmdir(path) < 0 && errno != ENOTEMPTY && errno != EEXIST)
        return error_set(ERROR_FAILED, "%s: cannot delete: %s", path, strerror(errno));
    return 0;
}

static int check_replaceable(const char *path)
{
    struct stat status;
    if (lstat(path, &status) < 0)
        return errno == ENOENT
                   ? 0
                   : error_set(ERROR_USER, "%s: cannot look: %s", path, strerror(errno));
    if (S_ISDIR(status.st_mode) && (folder_has(path, EXPORT_MARKER) || is_empty_folder(path)))
        return 0;
    (void)error_set(ERROR_USER, "%s: exists and is no earlier export", path);
    return error_hint("name a folder that does not exist yet, or move this one away");
}

/* ---- opening ---- */

static int choose_dtypes(struct export *e, const struct export_config *c)
{
    struct safetensors *source = NULL;
    struct safetensors_tensor found;
    int rc = 0;
    if (c->dtype != EXPORT_DTYPE_AUTO && c->dtype != DTYPE_F32 && c->dtype != DTYPE_BF16 &&
        c->dtype != DTYPE_F16)
        return error_set(ERROR_USER, "export dtype: expected float32, bfloat16 or float16");
    if (c->dtype == EXPORT_DTYPE_AUTO && c->weights_folder != NULL &&
        safetensors_open_folder(&source, c->weights_folder) < 0)
        return error_wrap("export with the dtypes of the source");
    for (uint32_t i = 0; i < e->layout->n_tensors && rc == 0; i++) {
        const char *name = e->layout->tensors[i].name;
        if (c->dtype != EXPORT_DTYPE_AUTO)
            e->dtypes[i] = (enum model_dtype)c->dtype;
        else if (source == NULL)
            e->dtypes[i] = e->layout->config.source_dtype;
        else if (model_find_weight(&e->layout->tensors[i], source, &found) == 0)
            e->dtypes[i] = found.dtype;
        else
            rc = error_set(ERROR_USER, "%s: tensor %s: expected, to know its dtype; found nowhere",
                           c->weights_folder, name);
    }
    safetensors_close(source);
    return rc;
}

/* A file of the model's folder, which no link leads out of. 1: read, 0: absent, or an error. */
int export_check_folder(const char *model_folder)
{
    for (size_t i = 0; i < N_COPIED; i++) {
        int fd;
        int rc = model_folder_open(model_folder, copied_files[i], &fd);
        if (rc < 0)
            return error_wrap("exports would copy it");
        if (rc > 0)
            (void)close(fd); /* was not read */
    }
    return 0;
}

static int copy_config(const struct export *e, const struct export_config *c)
{
    char *json, *rewritten = NULL;
    uint64_t n;
    int rc = model_folder_read(c->model_folder, CONFIG_NAME, COPIED_BYTES_MAX, &json, &n);
    if (rc == 0)
        return error_set(ERROR_USER, "%s/" CONFIG_NAME ": expected, found no such file",
                         c->model_folder);
    if (rc < 0)
        return rc;
    rc = 0;
    if (c->dtype != EXPORT_DTYPE_AUTO &&
        (enum model_dtype)c->dtype != e->layout->config.source_dtype) {
        rc = model_config_set_dtype(json, n, (enum model_dtype)c->dtype, &rewritten, &n);
        if (rc < 0)
            rc = error_wrap("%s", c->model_folder);
    }
    if (rc == 0)
        rc = folder_write_file(e->temporary, CONFIG_NAME, rewritten ? rewritten : json, n);
    free(rewritten);
    free(json);
    return rc;
}

/* 1: copied, 0: absent. */
static int copy_file(const struct export *e, const char *folder, const char *name)
{
    char *bytes;
    uint64_t n;
    int rc = model_folder_read(folder, name, COPIED_BYTES_MAX, &bytes, &n);
    if (rc <= 0)
        return rc;
    rc = folder_write_file(e->temporary, name, bytes, n);
    free(bytes);
    return rc < 0 ? rc : 1;
}

/* The tokenizer that the run names in place of the model folder's: wherever that path leads. */
static int copy_tokenizer(const struct export *e, const char *path)
{
    char *bytes;
    uint64_t n;
    int rc = model_file_read(path, COPIED_BYTES_MAX, &bytes, &n);
    if (rc == 0)
        return error_set(ERROR_USER, "%s: the tokenizer is gone", path);
    if (rc < 0)
        return rc;
    rc = folder_write_file(e->temporary, "tokenizer.json", bytes, n);
    free(bytes);
    return rc;
}

static int copy_files(const struct export *e, const struct export_config *c)
{
    int other = c->tokenizer && *c->tokenizer;
    for (size_t i = 0; i < N_COPIED; i++) {
        if (other && strcmp(copied_files[i], "tokenizer.json") == 0)
            continue;
        if (copy_file(e, c->model_folder, copied_files[i]) < 0)
            return -(int)error_kind_now();
    }
    if (other && copy_tokenizer(e, c->tokenizer) < 0)
        return -(int)error_kind_now();
    return copy_config(e, c);
}

static int check_space(const struct export *e)
{
    struct statvfs fs;
    uint64_t need = 0;
    for (uint32_t i = 0; i < e->layout->n_tensors; i++)
        need += e->layout->tensors[i].elements * model_dtype_bytes(e->dtypes[i]);
    if (statvfs(e->temporary, &fs) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", e->temporary, strerror(errno));
    uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (free_bytes >= need)
        return 0;
    (void)error_set(ERROR_FIT, "%s: the export takes %" PRIu64 " bytes, %" PRIu64 " are free there",
                    e->out, need, free_bytes);
    return error_hint("free some space, or export into another file system");
}

static int start_writer(struct export *e)
{
    int rc = safetensors_writer_open(&e->writer, e->temporary, SAFETENSORS_SHARD_BYTES_DEFAULT);
    for (uint32_t i = 0; i < e->layout->n_tensors && rc == 0; i++) {
        const struct model_tensor *t = &e->layout->tensors[i];
        const uint64_t shape[2] = {t->rows, t->cols};
        rc = safetensors_writer_declare(e->writer, t->name, e->dtypes[i], t->dims, shape);
    }
    if (rc == 0)
        rc = safetensors_writer_start(e->writer);
    if (rc == 0)
        e->bytes = safetensors_writer_bytes(e->writer);
    return rc;
}

/* The marker comes first: from then on the folder is known as ours, whenever we are killed. */
static int begin_folder(struct export *e, uint64_t step)
{
    char marker[96], *parent = folder_parent(e->out);
    int rc = folder_create(parent);
    free(parent);
    if (rc < 0 || check_replaceable(e->out) < 0 || check_replaceable(e->temporary) < 0)
        return -(int)error_kind_now();
    if (folder_has(e->temporary, EXPORT_MARKER) && remove_export(e->temporary) < 0)
        return error_wrap("what an interrupted export left");
    if (mkdir(e->temporary, 0777) < 0 && errno != EEXIST)
        return error_set(ERROR_FAILED, "%s: cannot create: %s", e->temporary, strerror(errno));
    e->begun = 1;
    int n = snprintf(marker, sizeof marker, "exported by mtlaunch\nstep %" PRIu64 "\n", step);
    return folder_write_file(e->temporary, EXPORT_MARKER, marker, (size_t)n);
}

static char *without_slashes(const char *path)
{
    char *copy = strdup(path);
    CHECK(copy != NULL);
    for (size_t n = strlen(copy); n > 1 && copy[n - 1] == '/'; n--)
        copy[n - 1] = '\0';
    return copy;
}

int export_open(struct export **out, const struct export_config *c)
{
    if (strlen(c->out) >= DIRECTORY_PATH_MAX)
        return error_set(ERROR_USER, "%s: path too long", c->out);
    struct export *e = calloc(1, sizeof *e);
    CHECK(e != NULL);
    e->layout = c->layout;
    e->out = without_slashes(c->out);
    CHECK(asprintf(&e->temporary, "%s" TEMPORARY_SUFFIX, e->out) > 0);
    e->dtypes = calloc(c->layout->n_tensors, sizeof *e->dtypes);
    e->chunk = malloc(CHUNK_ELEMENTS * sizeof *e->chunk);
    CHECK(e->dtypes != NULL && e->chunk != NULL);
    if (choose_dtypes(e, c) < 0 || begin_folder(e, c->step) < 0 || check_space(e) < 0 ||
        copy_files(e, c) < 0 || start_writer(e) < 0) {
        export_close(e);
        return -(int)error_kind_now();
    }
    *out = e;
    return 0;
}

uint64_t export_bytes(const struct export *e)
{
    return e->bytes;
}

/* ---- pages ---- */

/* A finite weight must not become infinite on the way out: that model would load and be useless. */
static int check_float16(const struct export *e, const struct model_part *part, uint64_t first,
                         uint64_t n)
{
    if (e->dtypes[part->tensor] != DTYPE_F16)
        return 0;
    for (uint64_t i = 0; i < n; i++) {
        if (fabsf(e->chunk[i]) <= FLOAT16_MAX || !isfinite(e->chunk[i]))
            continue;
        (void)error_set(ERROR_FAILED, "tensor %s: element %" PRIu64 " is %g, float16 ends at %g",
                        e->layout->tensors[part->tensor].name, first + i, (double)e->chunk[i],
                        (double)FLOAT16_MAX);
        return error_hint("export as bfloat16 or float32 (checkpoint.export_dtype)");
    }
    return 0;
}

/* Elements as f32. To bfloat16 go the weights that the device computed with, not the masters
 * rounded once more: the split rounds half up, the writer half to even. */
static void take_chunk(struct export *e, const struct model_part *part, const void *weights,
                       const uint16_t *residual, uint64_t at, uint64_t n)
{
    static const uint16_t none[CHUNK_ELEMENTS];
    if (residual == NULL)
        memcpy(e->chunk, (const float *)weights + at, n * sizeof *e->chunk);
    else
        join_master((const uint16_t *)weights + at,
                    e->dtypes[part->tensor] == DTYPE_BF16 ? none : residual + at, n, e->chunk);
}

static int write_part(struct export *e, const struct model_part *part, const void *weights,
                      const uint16_t *residual)
{
    for (uint64_t done = 0; done < part->count;) {
        uint64_t left = part->count - done, at = part->page_start + done;
        uint64_t n = left < CHUNK_ELEMENTS ? left : CHUNK_ELEMENTS;
        take_chunk(e, part, weights, residual, at, n);
        if (check_float16(e, part, part->tensor_start + done, n) < 0 ||
            safetensors_writer_write(e->writer, e->chunk, n) < 0)
            return -(int)error_kind_now();
        done += n;
    }
    return 0;
}

int export_page(struct export *e, const struct model_page *page, const void *weights,
                const uint16_t *residual)
{
    struct model_part parts[MODEL_LAYER_TENSORS_MAX];
    CHECK(e->next_page < e->layout->n_pages && page == &e->layout->pages[e->next_page]);
    uint32_t n = model_page_parts(e->layout, page, parts);
    for (uint32_t i = 0; i < n; i++)
        if (write_part(e, &parts[i], weights, residual) < 0)
            return error_wrap("export to %s", e->out);
    e->next_page++;
    return 0;
}

/* ---- finishing ---- */

/*
 * An earlier export in the place is exchanged for the new one in one step; where the file system
 * cannot, it is deleted first.
 */
static int move_into_place(const struct export *e)
{
    struct stat status;
    fault_point(FAULT_io_export_before_rename);
    if (check_replaceable(e->out) < 0)
        return -(int)error_kind_now();
    int exists = lstat(e->out, &status) == 0;
    if (exists && renameat2(AT_FDCWD, e->temporary, AT_FDCWD, e->out, RENAME_EXCHANGE) == 0) {
        (void)remove_export(e->temporary); /* the new one is in place; this is only space */
        return 0;
    }
    if (exists && remove_export(e->out) < 0)
        return -(int)error_kind_now();
    if (rename(e->temporary, e->out) < 0)
        return error_set(ERROR_FAILED, "%s: cannot rename into place: %s", e->temporary,
                         strerror(errno));
    return 0;
}

int export_finish(struct export *e)
{
    CHECK(e->next_page == e->layout->n_pages);
    char *parent = folder_parent(e->out);
    int rc = safetensors_writer_finish(e->writer);
    if (rc == 0)
        rc = folder_sync(e->temporary);
    if (rc == 0)
        rc = move_into_place(e);
    if (rc == 0) {
        e->begun = 0;
        rc = folder_sync(parent);
    }
    free(parent);
    return rc < 0 ? error_wrap("export to %s", e->out) : 0;
}

/* Keeps the error that led here: that we could also not clean up is not what the user needs. */
static void remove_unfinished(const struct export *e)
{
    enum error_kind kind = error_kind_now();
    char *text = strdup(error_text());
    CHECK(text != NULL);
    if (remove_export(e->temporary) < 0 && kind != ERROR_NONE)
        (void)error_set(kind, "%s", text);
    free(text);
}

void export_close(struct export *e)
{
    if (e == NULL)
        return;
    safetensors_writer_close(e->writer);
    if (e->begun)
        remove_unfinished(e);
    free(e->out);
    free(e->temporary);
    free(e->dtypes);
    free(e->chunk);
    free(e);
}

/* ---- rotation ---- */

/* "step-12": 1 and the number; "step-12.tmp": 2. Anything else, "step-012" too: 0. */
static int parse_step(const char *name, uint64_t *step)
{
    char again[64];
    if (sscanf(name, STEP_PREFIX "%" SCNu64, step) != 1)
        return 0;
    (void)snprintf(again, sizeof again, STEP_PREFIX "%" PRIu64, *step);
    size_t n = strlen(again);
    if (strncmp(name, again, n) != 0)
        return 0;
    return name[n] == '\0' ? 1 : strcmp(name + n, TEMPORARY_SUFFIX) == 0 ? 2 : 0;
}

static int compare_steps(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Our exports in the folder, oldest first; leftovers are deleted on the way. */
static int list_exports(const char *directory, uint64_t **steps, size_t *n)
{
    char path[PATH_MAX];
    uint64_t step;
    DIR *dir = opendir(directory);
    *steps = NULL;
    *n = 0;
    if (dir == NULL && errno == ENOENT)
        return 0;
    if (dir == NULL)
        return error_set(ERROR_FAILED, "%s: cannot open: %s", directory, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(dir)) != NULL;) {
        int what = parse_step(e->d_name, &step);
        (void)snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        if (what == 0 || !folder_has(path, EXPORT_MARKER))
            continue;
        if (what == 2) {
            rc = remove_export(path);
            continue;
        }
        *steps = reallocarray(*steps, *n + 1, sizeof **steps);
        CHECK(*steps != NULL);
        (*steps)[(*n)++] = step;
    }
    (void)closedir(dir); /* opened for reading */
    if (*n > 1)
        qsort(*steps, *n, sizeof **steps, compare_steps);
    return rc;
}

int export_rotate(const char *directory, uint64_t keep)
{
    char path[PATH_MAX];
    uint64_t *steps;
    size_t n;
    int rc = list_exports(directory, &steps, &n);
    for (size_t i = 0; rc == 0 && keep > 0 && i + keep < n; i++) {
        (void)snprintf(path, sizeof path, "%s/" STEP_PREFIX "%" PRIu64, directory, steps[i]);
        rc = remove_export(path);
    }
    free(steps);
    return rc;
}
