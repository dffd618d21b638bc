#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/folder_file.h"
#include "model/json.h"
#include "procs/check.h"
#include "procs/error.h"

enum {
    PATH_BYTES = 4096,
    PREFIX_BYTES = 8,
    READ_CHUNK_BYTES = 65536, /* on the stack: a read allocates nothing */
};

struct file {
    char *path;
    int fd;
    uint64_t bytes;
    uint64_t data_start; /* where data_offsets count from */
};

struct safetensors {
    uint32_t n_files;
    struct file *files;
    uint64_t n_tensors;
    uint64_t tensors_max; /* allocated */
    struct safetensors_tensor *tensors;
};

/* Short reads are continued; the end of the file where data should be is an error. */
static int read_at(const struct file *file, void *out, uint64_t bytes, uint64_t offset)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t n = pread(file->fd, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set(ERROR_FAILED, "%s: cannot read at byte %" PRIu64 ": %s", file->path,
                             offset + done, strerror(errno));
        if (n == 0)
            return error_set(ERROR_FAILED,
                             "%s: expected %" PRIu64 " bytes, found %" PRIu64
                             " (did it change while being read?)",
                             file->path, offset + bytes, offset + done);
        done += (uint64_t)n;
    }
    return 0;
}

/* ---- one tensor of a header ---- */

static int refuse(const struct file *file, const char *tensor, const char *expected,
                  const json_t *found)
{
    char text[MODEL_JSON_TEXT_BYTES];
    return error_set(ERROR_USER, "%s: tensor %s: expected %s, found %s", file->path, tensor,
                     expected, model_json_text(found, text));
}

static int parse_shape(const struct file *file, struct safetensors_tensor *t, const json_t *shape)
{
    if (!json_is_array(shape))
        return refuse(file, t->name, "an array as shape", shape);
    if (json_array_size(shape) > SAFETENSORS_DIMS_MAX)
        return refuse(file, t->name, "at most 8 dimensions as shape", shape);
    t->n_dims = (uint32_t)json_array_size(shape);
    t->elements = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return refuse(file, t->name, "sizes of at least 0 as shape", shape);
        t->shape[i] = (uint64_t)json_integer_value(size);
        if (__builtin_mul_overflow(t->elements, t->shape[i], &t->elements))
            return refuse(file, t->name, "a shape with fewer than 2^64 elements", shape);
    }
    return 0;
}

static int parse_offsets(const struct file *file, struct safetensors_tensor *t,
                         const json_t *offsets)
{
    const json_t *from = json_array_get(offsets, 0);
    const json_t *to = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(from) || !json_is_integer(to) ||
        json_integer_value(from) < 0 || json_integer_value(to) < json_integer_value(from))
        return refuse(file, t->name, "data_offsets [from, to] with 0 <= from <= to", offsets);
    uint64_t end = (uint64_t)json_integer_value(to);
    uint64_t data_bytes = file->bytes - file->data_start;
    if (end > data_bytes) {
        error_set(ERROR_USER,
                  "%s: tensor %s: expected data up to byte %" PRIu64
                  " after the header, found %" PRIu64 " bytes",
                  file->path, t->name, end, data_bytes);
        return error_hint("the file is cut short; fetch it again");
    }
    t->offset = file->data_start + (uint64_t)json_integer_value(from);
    t->bytes = end - (uint64_t)json_integer_value(from);
    return 0;
}

static int parse_tensor(const struct file *file, struct safetensors_tensor *t, const json_t *info)
{
    const json_t *dtype = json_object_get(info, "dtype");
    if (!json_is_object(info))
        return refuse(file, t->name, "an object with dtype, shape and data_offsets", info);
    if (!json_is_string(dtype) || model_dtype_from_name(json_string_value(dtype), &t->dtype) < 0)
        return refuse(file, t->name, "a known dtype (F32, BF16, F16, ...)", dtype);
    int rc = parse_shape(file, t, json_object_get(info, "shape"));
    if (rc == 0)
        rc = parse_offsets(file, t, json_object_get(info, "data_offsets"));
    if (rc < 0)
        return rc;
    uint64_t expected;
    if (__builtin_mul_overflow(t->elements, model_dtype_bytes(t->dtype), &expected))
        return refuse(file, t->name, "a shape with fewer than 2^64 bytes",
                      json_object_get(info, "shape"));
    if (expected != t->bytes)
        return error_set(ERROR_USER,
                         "%s: tensor %s: expected %" PRIu64 " bytes for %" PRIu64
                         " elements of %s, found %" PRIu64,
                         file->path, t->name, expected, t->elements, model_dtype_name(t->dtype),
                         t->bytes);
    return 0;
}

static int reserve_tensors(struct safetensors *st, uint64_t more)
{
    uint64_t want = st->n_tensors + more;
    if (want <= st->tensors_max)
        return 0;
    if (more > SAFETENSORS_TENSORS_MAX || want > SAFETENSORS_TENSORS_MAX)
        return error_set(ERROR_USER, "%s: expected at most %d tensors in a model, found %" PRIu64,
                         st->files[st->n_files - 1].path, SAFETENSORS_TENSORS_MAX, want);
    uint64_t room = want > 2 * st->tensors_max ? want : 2 * st->tensors_max;
    struct safetensors_tensor *grown = reallocarray(st->tensors, room, sizeof *grown);
    if (!grown)
        return error_set(ERROR_FAILED, "no memory for a table of %" PRIu64 " tensors", room);
    st->tensors = grown;
    st->tensors_max = room;
    return 0;
}

static int add_tensor(struct safetensors *st, uint32_t file, const char *name, const json_t *info)
{
    if (strlen(name) >= SAFETENSORS_NAME_BYTES)
        return error_set(ERROR_USER,
                         "%s: tensor %.40s...: expected a name below %d bytes, found %zu",
                         st->files[file].path, name, SAFETENSORS_NAME_BYTES, strlen(name));
    struct safetensors_tensor *t = &st->tensors[st->n_tensors];
    *t = (struct safetensors_tensor){.file = file};
    memcpy(t->name, name, strlen(name) + 1);
    int rc = parse_tensor(&st->files[file], t, info);
    if (rc == 0)
        st->n_tensors++;
    return rc;
}

static int check_metadata(const struct file *file, const json_t *metadata)
{
    const char *key;
    json_t *value;
    if (json_is_null(metadata)) /* an optional field, to the reference implementation */
        return 0;
    if (!json_is_object(metadata))
        return refuse(file, "__metadata__", "an object of strings", metadata);
    json_object_foreach((json_t *)metadata, key, value)
    {
        if (!json_is_string(value))
            return refuse(file, "__metadata__", "an object of strings", metadata);
    }
    return 0;
}

/* ---- one file ---- */

static int compare_offsets(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors first */
}

/* The tensors, sorted by place, cover the data exactly. */
static int check_cover(const struct file *file, struct safetensors_tensor *tensors, uint64_t n)
{
    if (n > 0)
        qsort(tensors, n, sizeof *tensors, compare_offsets);
    uint64_t next = file->data_start;
    for (uint64_t i = 0; i < n; i++) {
        const struct safetensors_tensor *t = &tensors[i];
        if (t->offset != next)
            return error_set(ERROR_USER,
                             "%s: tensor %s: %s: expected its data at byte %" PRIu64
                             ", found at %" PRIu64,
                             file->path, t->name,
                             t->offset > next ? "hole before it" : "overlaps the tensor before it",
                             next, t->offset);
        next += t->bytes;
    }
    if (next != file->bytes)
        return error_set(ERROR_USER,
                         "%s: trailing bytes: expected the file to end at byte %" PRIu64
                         " with its last tensor, found %" PRIu64 " bytes",
                         file->path, next, file->bytes);
    return 0;
}

static int add_header(struct safetensors *st, uint32_t file, const json_t *header)
{
    const char *name;
    json_t *info;
    uint64_t first = st->n_tensors;
    int rc = reserve_tensors(st, json_object_size(header));
    if (rc < 0)
        return rc;
    json_object_foreach((json_t *)header, name, info)
    {
        if (strcmp(name, "__metadata__") == 0)
            rc = check_metadata(&st->files[file], info);
        else
            rc = add_tensor(st, file, name, info);
        if (rc < 0)
            return rc;
    }
    /* a header without tensors has allocated no table */
    return check_cover(&st->files[file], st->tensors ? &st->tensors[first] : NULL,
                       st->n_tensors - first);
}

static int read_header(struct safetensors *st, uint32_t index, uint64_t bytes)
{
    const struct file *file = &st->files[index];
    char where[PATH_BYTES + 16];
    (void)snprintf(where, sizeof where, "%s (header)", file->path); /* a long path is cut */
    char *text = malloc(bytes);
    if (!text)
        return error_set(ERROR_FAILED, "%s: no memory for its header of %" PRIu64 " bytes",
                         file->path, bytes);
    json_t *header = NULL;
    int rc = read_at(file, text, bytes, PREFIX_BYTES);
    if (rc == 0 && text[0] != '{')
        rc = error_set(ERROR_USER, "%s: expected { at byte 8, found byte 0x%02x", where,
                       (unsigned char)text[0]);
    if (rc == 0)
        rc = model_json_parse(&header, text, bytes, where);
    free(text);
    if (rc == 0)
        rc = add_header(st, index, header);
    json_decref(header);
    return rc;
}

static int open_header(struct safetensors *st, uint32_t index)
{
    struct file *file = &st->files[index];
    struct stat status;
    if (fstat(file->fd, &status) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", file->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(ERROR_USER, "%s: expected a regular file", file->path);
    file->bytes = (uint64_t)status.st_size;
    if (file->bytes < PREFIX_BYTES)
        return error_set(ERROR_USER,
                         "%s: expected a safetensors file of at least 8 bytes, found %" PRIu64,
                         file->path, file->bytes);
    unsigned char prefix[PREFIX_BYTES];
    int rc = read_at(file, prefix, sizeof prefix, 0);
    if (rc < 0)
        return rc;
    uint64_t bytes = 0;
    for (int i = PREFIX_BYTES - 1; i >= 0; i--)
        bytes = bytes << 8 | prefix[i];
    uint64_t limit = file->bytes - PREFIX_BYTES;
    if (limit > SAFETENSORS_HEADER_BYTES_MAX)
        limit = SAFETENSORS_HEADER_BYTES_MAX;
    if (bytes < 2 || bytes > limit) {
        error_set(ERROR_USER, "%s: header length: expected 2 to %" PRIu64 " bytes, found %" PRIu64,
                  file->path, limit, bytes);
        return error_hint("this is no safetensors file, or it is cut short");
    }
    file->data_start = PREFIX_BYTES + bytes;
    return read_header(st, index, bytes);
}

/* Takes over fd as the next file; whatever happens, safetensors_close() releases it. */
static int add_file(struct safetensors *st, const char *path, int fd)
{
    struct file *file = &st->files[st->n_files];
    file->path = strdup(path);
    if (!file->path) {
        (void)close(fd); /* was not read */
        return error_set(ERROR_FAILED, "%s: no memory", path);
    }
    file->fd = fd;
    return open_header(st, st->n_files++);
}

/* 1, 0: absent, or an error. */
static int add_file_of(struct safetensors *st, const char *folder, const char *name)
{
    char path[PATH_BYTES];
    int fd;
    int rc = model_folder_open(folder, name, &fd);
    if (rc <= 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* fits: it was opened */
    rc = add_file(st, path, fd);
    return rc < 0 ? rc : 1;
}

/* ---- all files ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct safetensors_tensor *)a)->name,
                  ((const struct safetensors_tensor *)b)->name);
}

/* No two are equal: within a file the JSON forbids it, across files check_shard(). */
static void sort_names(struct safetensors *st)
{
    if (st->n_tensors > 0)
        qsort(st->tensors, st->n_tensors, sizeof *st->tensors, compare_names);
}

static int allocate(struct safetensors **out, uint32_t n_files)
{
    struct safetensors *st = calloc(1, sizeof *st);
    struct file *files = calloc(n_files, sizeof *files);
    *out = st;
    if (!st || !files) {
        free(st);
        free(files);
        *out = NULL;
        return error_set(ERROR_FAILED, "no memory for a list of %" PRIu32 " weight files", n_files);
    }
    st->files = files;
    return 0;
}

/* Gives up what was opened so far; returns rc. */
static int give_up(struct safetensors **st, int rc)
{
    safetensors_close(*st);
    *st = NULL;
    return rc;
}

int safetensors_open_file(struct safetensors **st, const char *path)
{
    *st = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return error_set(errno == ENOENT || errno == EACCES ? ERROR_USER : ERROR_FAILED,
                         "%s: cannot open: %s", path, strerror(errno));
    int rc = allocate(st, 1);
    if (rc < 0) {
        (void)close(fd); /* was not read */
        return rc;
    }
    rc = add_file(*st, path, fd);
    if (rc < 0)
        return give_up(st, rc);
    sort_names(*st);
    return 0;
}

/* model.safetensors of the folder. 1, 0: absent, or an error. */
static int open_single(struct safetensors **st, const char *folder)
{
    int rc = allocate(st, 1);
    if (rc < 0)
        return rc;
    rc = add_file_of(*st, folder, "model.safetensors");
    if (rc <= 0)
        return give_up(st, rc);
    sort_names(*st);
    return 1;
}

static int compare_strings(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int check_shard_name(const char *index, const char *tensor, const json_t *value)
{
    const char *name = json_string_value(value);
    char text[MODEL_JSON_TEXT_BYTES];
    size_t n = name ? strlen(name) : 0;
    static const char suffix[] = ".safetensors";
    size_t m = sizeof suffix - 1;
    if (!name || strchr(name, '/') || strchr(name, '\\') || n <= m ||
        strcmp(name + n - m, suffix) != 0)
        return error_set(ERROR_USER,
                         "%s: tensor %s: expected the name of a .safetensors file in the same "
                         "folder, found %s",
                         index, tensor, model_json_text(value, text));
    return 0;
}

/* names: room for all entries; filled with the distinct shard names, sorted. */
static int collect_shards(const char *index, const json_t *map, const char **names, uint32_t *n)
{
    const char *tensor;
    json_t *value;
    size_t count = 0;
    json_object_foreach((json_t *)map, tensor, value)
    {
        int rc = check_shard_name(index, tensor, value);
        if (rc < 0)
            return rc;
        names[count++] = json_string_value(value);
    }
    qsort(names, count, sizeof *names, compare_strings);
    size_t distinct = 0;
    for (size_t i = 0; i < count; i++)
        if (i == 0 || strcmp(names[i], names[i - 1]) != 0)
            names[distinct++] = names[i];
    if (distinct > SAFETENSORS_SHARDS_MAX)
        return error_set(ERROR_USER, "%s: expected at most %d shards, found %zu", index,
                         SAFETENSORS_SHARDS_MAX, distinct);
    *n = (uint32_t)distinct;
    return 0;
}

/* model.safetensors.index.json, opened. */
struct index {
    const char *folder;
    const char *path;
    const json_t *map; /* "weight_map" */
};

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The newest file, with its tensors from `first` on, is the shard that the index describes: it
 * holds no tensor that the index puts elsewhere or does not know. Asked after each file, so that a
 * hundred names for one file are noticed at the second. */
static int check_shard(const struct safetensors *st, uint64_t first, const struct index *index)
{
    const struct file *file = &st->files[st->n_files - 1];
    const char *shard = base_name(file->path);
    for (uint64_t i = first; i < st->n_tensors; i++) {
        const char *name = st->tensors[i].name;
        const char *said = json_string_value(json_object_get(index->map, name));
        if (!said)
            return error_set(ERROR_USER, "%s: tensor %s: expected in the index, found in %s alone",
                             index->path, name, file->path);
        if (strcmp(said, shard) != 0)
            return error_set(ERROR_USER, "%s: tensor %s: expected in %s, found in %s", index->path,
                             name, said, shard);
    }
    return 0;
}

/* Every tensor of the index is in some shard; in which, check_shard() has seen. */
static int check_complete(const struct safetensors *st, const struct index *index)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)index->map, name, value)
    {
        struct safetensors_tensor t;
        if (safetensors_find(st, name, &t) < 0)
            return error_set(ERROR_USER, "%s: tensor %s: expected in %s, found nowhere",
                             index->path, name, json_string_value(value));
    }
    return 0;
}

static int open_shards(struct safetensors *st, const struct index *index, const char **names,
                       uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t first = st->n_tensors;
        int rc = add_file_of(st, index->folder, names[i]);
        if (rc == 0) {
            error_set(ERROR_USER, "%s/%s: expected the shard that the index names, found no file",
                      index->folder, names[i]);
            return error_hint("was the folder fetched whole?");
        }
        if (rc > 0)
            rc = check_shard(st, first, index);
        if (rc < 0)
            return rc;
    }
    sort_names(st);
    return check_complete(st, index);
}

static int open_weight_map(struct safetensors **st, const struct index *index)
{
    size_t entries = json_object_size(index->map); /* 0 unless it is an object */
    if (entries == 0)
        return error_set(ERROR_USER, "%s: weight_map: expected an object {tensor: file}",
                         index->path);
    if (entries > SAFETENSORS_TENSORS_MAX)
        return error_set(ERROR_USER, "%s: expected at most %d tensors in a model, found %zu",
                         index->path, SAFETENSORS_TENSORS_MAX, entries);
    const char **names = calloc(entries, sizeof *names);
    if (!names)
        return error_set(ERROR_FAILED, "%s: no memory for %zu names", index->path, entries);
    uint32_t n = 0;
    int rc = collect_shards(index->path, index->map, names, &n);
    if (rc == 0)
        rc = allocate(st, n);
    if (rc == 0)
        rc = open_shards(*st, index, names, n);
    free(names);
    return rc;
}

/* The shards of the folder's index. 1, 0: there is no index, or an error. */
static int open_index(struct safetensors **st, const char *folder)
{
    static const char name[] = "model.safetensors.index.json";
    char path[PATH_BYTES];
    json_t *root;
    int rc = model_json_load_in(&root, folder, name, SAFETENSORS_HEADER_BYTES_MAX);
    if (rc <= 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* fits: it was opened */
    const struct index index = {folder, path, json_object_get(root, "weight_map")};
    rc = open_weight_map(st, &index);
    json_decref(root);
    return rc < 0 ? give_up(st, rc) : 1;
}

int safetensors_open_folder(struct safetensors **st, const char *folder)
{
    *st = NULL;
    int rc = open_single(st, folder);
    if (rc == 0)
        rc = open_index(st, folder);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    error_set(ERROR_USER,
              "%s: expected model.safetensors or model.safetensors.index.json, found neither",
              folder);
    return error_hint("weights in other formats (pytorch_model.bin) are converted by loading and "
                      "saving them with transformers");
}

void safetensors_close(struct safetensors *st)
{
    if (!st)
        return;
    for (uint32_t i = 0; i < st->n_files; i++) {
        (void)close(st->files[i].fd); /* was only read */
        free(st->files[i].path);
    }
    free(st->files);
    free(st->tensors);
    free(st);
}

uint64_t safetensors_n_tensors(const struct safetensors *st)
{
    return st->n_tensors;
}

const struct safetensors_tensor *safetensors_tensor_at(const struct safetensors *st, uint64_t i)
{
    CHECK(i < st->n_tensors);
    return &st->tensors[i];
}

static int compare_name_to(const void *name, const void *tensor)
{
    return strcmp(name, ((const struct safetensors_tensor *)tensor)->name);
}

int safetensors_find(const struct safetensors *st, const char *name, struct safetensors_tensor *out)
{
    if (st->n_tensors == 0)
        return -1;
    const struct safetensors_tensor *t =
        bsearch(name, st->tensors, st->n_tensors, sizeof *st->tensors, compare_name_to);
    if (!t)
        return -1;
    *out = *t;
    return 0;
}

const char *safetensors_file_path(const struct safetensors *st, uint32_t file)
{
    CHECK(file < st->n_files);
    return st->files[file].path;
}

/* ---- data ---- */

int safetensors_read_raw(const struct safetensors *st, const struct safetensors_tensor *tensor,
                         uint64_t first_element, uint64_t count, void *out)
{
    CHECK(tensor->file < st->n_files);
    CHECK(first_element <= tensor->elements && count <= tensor->elements - first_element);
    uint64_t size = model_dtype_bytes(tensor->dtype);
    int rc =
        read_at(&st->files[tensor->file], out, count * size, tensor->offset + first_element * size);
    return rc < 0 ? error_wrap("tensor %s", tensor->name) : 0;
}

int safetensors_read(const struct safetensors *st, const struct safetensors_tensor *tensor,
                     uint64_t first_element, uint64_t count, float *out)
{
    if (tensor->dtype == DTYPE_F32)
        return safetensors_read_raw(st, tensor, first_element, count, out);
    if (tensor->dtype != DTYPE_BF16 && tensor->dtype != DTYPE_F16)
        return error_set(ERROR_USER, "%s: tensor %s: expected dtype F32, BF16 or F16, found %s",
                         safetensors_file_path(st, tensor->file), tensor->name,
                         model_dtype_name(tensor->dtype));
    uint16_t halves[READ_CHUNK_BYTES / 2];
    const uint64_t chunk_max = READ_CHUNK_BYTES / 2;
    while (count > 0) {
        uint64_t n = count < chunk_max ? count : chunk_max;
        int rc = safetensors_read_raw(st, tensor, first_element, n, halves);
        if (rc < 0)
            return rc;
        if (tensor->dtype == DTYPE_BF16)
            dtype_bf16_to_f32(halves, n, out);
        else
            dtype_f16_to_f32(halves, n, out);
        first_element += n;
        out += n;
        count -= n;
    }
    return 0;
}
