#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* Opens the next file; whatever happens, safetensors_close() releases it. */
static int add_file(struct safetensors *st, const char *path)
{
    uint32_t index = st->n_files;
    struct file *file = &st->files[index];
    file->path = strdup(path);
    if (!file->path)
        return error_set(ERROR_FAILED, "%s: no memory", path);
    file->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0) {
        int missing = errno == ENOENT || errno == EACCES;
        int rc = error_set(missing ? ERROR_USER : ERROR_FAILED, "%s: cannot open: %s", path,
                           strerror(errno));
        free(file->path);
        return rc;
    }
    st->n_files++;
    return open_header(st, index);
}

/* ---- all files ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct safetensors_tensor *)a)->name,
                  ((const struct safetensors_tensor *)b)->name);
}

static int sort_names(struct safetensors *st)
{
    if (st->n_tensors > 0)
        qsort(st->tensors, st->n_tensors, sizeof *st->tensors, compare_names);
    for (uint64_t i = 1; i < st->n_tensors; i++) {
        const struct safetensors_tensor *a = &st->tensors[i - 1], *b = &st->tensors[i];
        if (strcmp(a->name, b->name) == 0)
            return error_set(ERROR_USER, "tensor %s: expected in one file, found in %s and %s",
                             a->name, st->files[a->file].path, st->files[b->file].path);
    }
    return 0;
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

static int open_single(struct safetensors *st, const char *path)
{
    int rc = add_file(st, path);
    return rc < 0 ? rc : sort_names(st);
}

int safetensors_open_file(struct safetensors **st, const char *path)
{
    int rc = allocate(st, 1);
    if (rc < 0)
        return rc;
    rc = open_single(*st, path);
    if (rc < 0) {
        safetensors_close(*st);
        *st = NULL;
    }
    return rc;
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

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The index and the shards tell the same: every tensor is where the index says, and no other is. */
static int check_index(const struct safetensors *st, const char *index, const json_t *map)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)map, name, value)
    {
        struct safetensors_tensor t;
        const char *shard = json_string_value(value);
        if (safetensors_find(st, name, &t) < 0)
            return error_set(ERROR_USER, "%s: tensor %s: expected in %s, found nowhere", index,
                             name, shard);
        if (strcmp(base_name(st->files[t.file].path), shard) != 0)
            return error_set(ERROR_USER, "%s: tensor %s: expected in %s, found in %s", index, name,
                             shard, base_name(st->files[t.file].path));
    }
    for (uint64_t i = 0; i < st->n_tensors; i++)
        if (!json_object_get(map, st->tensors[i].name))
            return error_set(ERROR_USER, "%s: tensor %s: expected in the index, found in %s alone",
                             index, st->tensors[i].name, st->files[st->tensors[i].file].path);
    return 0;
}

static int open_shards(struct safetensors *st, const char *folder, const char **names, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        char path[PATH_BYTES];
        int length = snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        if (length < 0 || length >= (int)sizeof path)
            return error_set(ERROR_USER, "%s: expected a path below %d bytes, found %d", names[i],
                             PATH_BYTES, length);
        int rc = add_file(st, path);
        if (rc < 0)
            return rc;
    }
    return sort_names(st);
}

static int open_weight_map(struct safetensors **st, const char *folder, const char *index,
                           const json_t *map)
{
    if (!json_is_object(map) || json_object_size(map) == 0)
        return error_set(ERROR_USER, "%s: weight_map: expected an object {tensor: file}", index);
    const char **names = calloc(json_object_size(map), sizeof *names);
    if (!names)
        return error_set(ERROR_FAILED, "%s: no memory for %zu names", index, json_object_size(map));
    uint32_t n = 0;
    int rc = collect_shards(index, map, names, &n);
    if (rc == 0)
        rc = allocate(st, n);
    if (rc == 0)
        rc = open_shards(*st, folder, names, n);
    if (rc == 0)
        rc = check_index(*st, index, map);
    free(names);
    return rc;
}

static int open_index(struct safetensors **st, const char *folder, const char *index)
{
    json_t *root;
    int rc = model_json_load(&root, index, SAFETENSORS_HEADER_BYTES_MAX);
    if (rc < 0)
        return rc;
    rc = open_weight_map(st, folder, index, json_object_get(root, "weight_map"));
    json_decref(root);
    if (rc < 0) {
        safetensors_close(*st);
        *st = NULL;
    }
    return rc;
}

int safetensors_open_folder(struct safetensors **st, const char *folder)
{
    char path[PATH_BYTES];
    *st = NULL;
    int n = snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (n < 0 || n > PATH_BYTES - 32)
        return error_set(ERROR_USER, "model folder: expected a path below %d bytes, found %d",
                         PATH_BYTES - 64, n);
    if (access(path, F_OK) == 0)
        return safetensors_open_file(st, path);
    (void)snprintf(path, sizeof path, "%s/model.safetensors.index.json",
                   folder); /* fits, see above */
    if (access(path, F_OK) == 0)
        return open_index(st, folder, path);
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
