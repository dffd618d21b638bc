/*
 * The writing half of safetensors.h. Shards are runs of tensors in the order of declaration, so one
 * file is open at a time. Within a shard the place of each tensor is chosen as the reference
 * implementation does (larger alignment first, so that every tensor is aligned to its element), and
 * data goes there with pwrite, whatever the order of declaration.
 */
#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/json.h"
#include "procs/check.h"
#include "procs/error.h"

enum { FOLDER_BYTES = 3900, PATH_BYTES = 4096, CHUNK_ELEMENTS = 16384 };

struct entry {
    struct safetensors_tensor t; /* t.file: shard; t.offset: in the file */
};

struct shard {
    uint64_t first; /* entry, in order of declaration */
    uint64_t n;
    uint64_t header_bytes; /* prefix included */
    uint64_t data_bytes;
};

struct safetensors_writer {
    char folder[FOLDER_BYTES];
    uint64_t shard_bytes_max;
    uint64_t n_entries, entries_max;
    struct entry *entries; /* in order of declaration */
    uint64_t *order;       /* per shard its entries by place in the file; before start() unused */
    uint32_t n_shards;
    struct shard *shards;
    int started;
    uint64_t current;         /* entry being written */
    uint64_t current_written; /* its elements so far */
    int fd;                   /* of the current entry's shard; -1: not open */
    char path[PATH_BYTES];    /* of fd */
};

int safetensors_writer_open(struct safetensors_writer **out, const char *folder,
                            uint64_t shard_bytes_max)
{
    CHECK(shard_bytes_max > 0);
    *out = NULL;
    if (strlen(folder) >= FOLDER_BYTES)
        return error_set(ERROR_USER,
                         "folder for weights: expected a path below %d bytes, found %zu",
                         FOLDER_BYTES, strlen(folder));
    struct safetensors_writer *w = calloc(1, sizeof *w);
    if (!w)
        return error_set(ERROR_FAILED, "%s: no memory to write weights", folder);
    memcpy(w->folder, folder, strlen(folder) + 1);
    w->shard_bytes_max = shard_bytes_max;
    w->fd = -1;
    *out = w;
    return 0;
}

void safetensors_writer_close(struct safetensors_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0)
        (void)close(w->fd); /* unfinished: the caller throws the folder away */
    free(w->entries);
    free(w->order);
    free(w->shards);
    free(w);
}

/* ---- declaring ---- */

static int grow_entries(struct safetensors_writer *w)
{
    if (w->n_entries < w->entries_max)
        return 0;
    uint64_t room = w->entries_max ? 2 * w->entries_max : 64;
    struct entry *grown = reallocarray(w->entries, room, sizeof *grown);
    if (!grown)
        return error_set(ERROR_FAILED, "%s: no memory for %" PRIu64 " tensors", w->folder, room);
    w->entries = grown;
    w->entries_max = room;
    return 0;
}

int safetensors_writer_declare(struct safetensors_writer *w, const char *name,
                               enum model_dtype dtype, uint32_t n_dims, const uint64_t *shape)
{
    CHECK(!w->started);
    CHECK(n_dims <= SAFETENSORS_DIMS_MAX);
    if (strlen(name) >= SAFETENSORS_NAME_BYTES || name[0] == '\0' ||
        strcmp(name, "__metadata__") == 0)
        return error_set(ERROR_USER, "tensor %.40s: expected a name of 1 to %d bytes, found %zu",
                         name, SAFETENSORS_NAME_BYTES - 1, strlen(name));
    int rc = grow_entries(w);
    if (rc < 0)
        return rc;
    struct safetensors_tensor *t = &w->entries[w->n_entries].t;
    *t = (struct safetensors_tensor){.dtype = dtype, .n_dims = n_dims, .elements = 1};
    memcpy(t->name, name, strlen(name) + 1);
    for (uint32_t i = 0; i < n_dims; i++) {
        t->shape[i] = shape[i];
        CHECK(!__builtin_mul_overflow(t->elements, shape[i], &t->elements));
    }
    CHECK(!__builtin_mul_overflow(t->elements, model_dtype_bytes(dtype), &t->bytes));
    w->n_entries++;
    return 0;
}

/* ---- planning ---- */

/* The reference sorts by its own enumeration of dtypes, largest first: this is that enumeration. */
static int dtype_rank(enum model_dtype dtype)
{
    static const int rank[DTYPE_COUNT] = {
        [DTYPE_BOOL] = 0,    [DTYPE_U8] = 1,      [DTYPE_I8] = 2,   [DTYPE_F8_E5M2] = 3,
        [DTYPE_F8_E4M3] = 4, [DTYPE_F8_E8M0] = 5, [DTYPE_I16] = 6,  [DTYPE_U16] = 7,
        [DTYPE_F16] = 8,     [DTYPE_BF16] = 9,    [DTYPE_I32] = 10, [DTYPE_U32] = 11,
        [DTYPE_F32] = 12,    [DTYPE_C64] = 13,    [DTYPE_F64] = 14, [DTYPE_I64] = 15,
        [DTYPE_U64] = 16,
    };
    return rank[dtype];
}

static int compare_places(const void *a, const void *b, void *entries)
{
    const struct safetensors_tensor *x = &((const struct entry *)entries)[*(const uint64_t *)a].t;
    const struct safetensors_tensor *y = &((const struct entry *)entries)[*(const uint64_t *)b].t;
    int order = dtype_rank(y->dtype) - dtype_rank(x->dtype);
    return order != 0 ? order : strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b, void *entries)
{
    const struct entry *e = entries;
    return strcmp(e[*(const uint64_t *)a].t.name, e[*(const uint64_t *)b].t.name);
}

static int check_distinct(struct safetensors_writer *w)
{
    for (uint64_t i = 0; i < w->n_entries; i++)
        w->order[i] = i;
    qsort_r(w->order, w->n_entries, sizeof *w->order, compare_names, w->entries);
    for (uint64_t i = 1; i < w->n_entries; i++) {
        const char *name = w->entries[w->order[i]].t.name;
        if (strcmp(name, w->entries[w->order[i - 1]].t.name) == 0)
            return error_set(ERROR_USER, "%s: tensor %s: expected once, declared twice", w->folder,
                             name);
    }
    return 0;
}

/* A shard takes tensors while they fit, and always one. */
static void cut_shards(struct safetensors_writer *w)
{
    for (uint64_t i = 0; i < w->n_entries; i++) {
        struct shard *shard = &w->shards[w->n_shards > 0 ? w->n_shards - 1 : 0];
        uint64_t bytes = w->entries[i].t.bytes;
        if (w->n_shards == 0 || shard->data_bytes > w->shard_bytes_max ||
            bytes > w->shard_bytes_max - shard->data_bytes) {
            shard = &w->shards[w->n_shards++];
            *shard = (struct shard){.first = i};
        }
        shard->n++;
        shard->data_bytes += bytes;
        w->entries[i].t.file = w->n_shards - 1;
    }
}

static void write_json_string(FILE *out, const char *text)
{
    json_t *string = json_string(text);
    (void)json_dumpf(string, out, JSON_ENCODE_ANY); /* errors show in ferror(), which is read */
    json_decref(string);
}

static void write_header_entry(FILE *out, const struct safetensors_tensor *t, uint64_t data_start)
{
    write_json_string(out, t->name);
    fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", model_dtype_name(t->dtype));
    for (uint32_t i = 0; i < t->n_dims; i++)
        fprintf(out, "%s%" PRIu64, i ? "," : "", t->shape[i]);
    uint64_t from = t->offset - data_start;
    fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", from, from + t->bytes);
}

/*
 * The header of a shard, prefix included, padded with spaces to a multiple of 8; free() it.
 * Tensor offsets are relative to data_start.
 */
static int make_header(const struct safetensors_writer *w, const struct shard *shard,
                       uint64_t data_start, char **text, uint64_t *bytes)
{
    size_t size = 0;
    *text = NULL;
    FILE *out = open_memstream(text, &size);
    if (!out)
        return error_set(ERROR_FAILED, "%s: no memory for a header", w->folder);
    fprintf(out, "%8s{\"__metadata__\":{\"format\":\"pt\"}", "");
    for (uint64_t i = 0; i < shard->n; i++) {
        fputc(',', out);
        write_header_entry(out, &w->entries[w->order[shard->first + i]].t, data_start);
    }
    fputc('}', out);
    while (ftell(out) % 8 != 0)
        fputc(' ', out);
    int failed = ferror(out);
    failed |= fclose(out) != 0;
    if (failed) {
        free(*text);
        *text = NULL;
        return error_set(ERROR_FAILED, "%s: no memory for a header of %" PRIu64 " tensors",
                         w->folder, shard->n);
    }
    for (int i = 0; i < 8; i++)
        (*text)[i] = (char)((size - 8) >> (8 * i));
    *bytes = size;
    return 0;
}

/* Gives each tensor of the shard its place: first relative to the data, then in the file. */
static int place_tensors(struct safetensors_writer *w, struct shard *shard)
{
    uint64_t *order = &w->order[shard->first];
    for (uint64_t i = 0; i < shard->n; i++)
        order[i] = shard->first + i;
    qsort_r(order, shard->n, sizeof *order, compare_places, w->entries);
    uint64_t offset = 0;
    for (uint64_t i = 0; i < shard->n; i++) {
        w->entries[order[i]].t.offset = offset;
        offset += w->entries[order[i]].t.bytes;
    }
    char *text;
    int rc = make_header(w, shard, 0, &text, &shard->header_bytes);
    if (rc < 0)
        return rc;
    free(text);
    if (shard->header_bytes - 8 > SAFETENSORS_HEADER_BYTES_MAX)
        return error_set(ERROR_FAILED,
                         "%s: header: expected at most %" PRIu64 " bytes, found %" PRIu64,
                         w->folder, SAFETENSORS_HEADER_BYTES_MAX, shard->header_bytes);
    for (uint64_t i = 0; i < shard->n; i++)
        w->entries[order[i]].t.offset += shard->header_bytes;
    return 0;
}

int safetensors_writer_start(struct safetensors_writer *w)
{
    CHECK(!w->started);
    CHECK(w->n_entries > 0);
    w->order = calloc(w->n_entries, sizeof *w->order);
    w->shards = calloc(w->n_entries, sizeof *w->shards);
    if (!w->order || !w->shards)
        return error_set(ERROR_FAILED, "%s: no memory for %" PRIu64 " tensors", w->folder,
                         w->n_entries);
    int rc = check_distinct(w);
    if (rc < 0)
        return rc;
    cut_shards(w);
    for (uint32_t i = 0; i < w->n_shards && rc == 0; i++)
        rc = place_tensors(w, &w->shards[i]);
    w->started = rc == 0;
    return rc;
}

uint64_t safetensors_writer_bytes(const struct safetensors_writer *w)
{
    CHECK(w->started);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < w->n_shards; i++)
        bytes += w->shards[i].header_bytes + w->shards[i].data_bytes;
    return bytes;
}

/* ---- writing ---- */

static void shard_name(const struct safetensors_writer *w, uint32_t shard, char name[64])
{
    if (w->n_shards == 1)
        (void)snprintf(name, 64, "model.safetensors");
    else
        (void)snprintf(name, 64, "model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", shard + 1,
                       w->n_shards);
}

static int failed_at(const struct safetensors_writer *w, const char *what)
{
    int out_of_space = errno == ENOSPC || errno == EDQUOT;
    int rc = error_set(ERROR_FAILED, "%s: cannot %s: %s", w->path, what, strerror(errno));
    return out_of_space ? error_hint("free some space") : rc;
}

static int write_at(const struct safetensors_writer *w, const void *data, uint64_t bytes,
                    uint64_t offset)
{
    for (uint64_t done = 0; done < bytes;) {
        ssize_t n = pwrite(w->fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return failed_at(w, "write");
        done += (uint64_t)n;
    }
    return 0;
}

/* Opens w->path, a new file, as w->fd. */
static int create_file(struct safetensors_writer *w, const char *name)
{
    (void)snprintf(w->path, sizeof w->path, "%s/%s", w->folder, name); /* fits: FOLDER_BYTES */
    w->fd = open(w->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    return w->fd < 0 ? failed_at(w, "create") : 0;
}

/* Durable and closed. An error of fsync or close is final: the data may be gone. */
static int seal_file(struct safetensors_writer *w)
{
    int rc = fsync(w->fd) < 0 ? failed_at(w, "fsync") : 0;
    int closed = close(w->fd);
    w->fd = -1;
    if (rc == 0 && closed < 0)
        rc = failed_at(w, "close");
    return rc;
}

static int begin_shard(struct safetensors_writer *w, uint32_t index)
{
    const struct shard *shard = &w->shards[index];
    char name[64];
    shard_name(w, index, name);
    int rc = create_file(w, name);
    if (rc < 0)
        return rc;
    uint64_t bytes = shard->header_bytes + shard->data_bytes;
    /* so that a full disk shows before the first byte; file systems without it just go on */
    if (fallocate(w->fd, 0, 0, (off_t)bytes) < 0 && (errno == ENOSPC || errno == EDQUOT))
        return failed_at(w, "reserve its space");
    char *text;
    rc = make_header(w, shard, shard->header_bytes, &text, &bytes);
    if (rc < 0)
        return rc;
    CHECK(bytes == shard->header_bytes);
    rc = write_at(w, text, bytes, 0);
    free(text);
    return rc;
}

/* Makes the current entry one that misses elements, and its file the open one. */
static int advance(struct safetensors_writer *w)
{
    while (w->current < w->n_entries) {
        const struct safetensors_tensor *t = &w->entries[w->current].t;
        const struct shard *shard = &w->shards[t->file];
        if (w->fd < 0) {
            int rc = begin_shard(w, t->file);
            if (rc < 0)
                return rc;
        }
        if (w->current_written < t->elements)
            return 0;
        w->current_written = 0;
        w->current++;
        if (w->current == shard->first + shard->n) {
            int rc = seal_file(w);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

uint64_t safetensors_writer_missing(const struct safetensors_writer *w)
{
    CHECK(w->started);
    for (uint64_t i = w->current, written = w->current_written; i < w->n_entries; i++, written = 0)
        if (w->entries[i].t.elements > written)
            return w->entries[i].t.elements - written;
    return 0;
}

int safetensors_writer_write_raw(struct safetensors_writer *w, const void *values, uint64_t count)
{
    CHECK(w->started);
    if (count == 0)
        return 0;
    int rc = advance(w);
    if (rc < 0)
        return rc;
    CHECK(w->current < w->n_entries);
    const struct safetensors_tensor *t = &w->entries[w->current].t;
    CHECK(count <= t->elements - w->current_written);
    uint64_t size = model_dtype_bytes(t->dtype);
    rc = write_at(w, values, count * size, t->offset + w->current_written * size);
    if (rc < 0)
        return error_wrap("tensor %s", t->name);
    w->current_written += count;
    return advance(w);
}

int safetensors_writer_write(struct safetensors_writer *w, const float *values, uint64_t count)
{
    CHECK(w->started);
    while (count > 0) {
        int rc = advance(w);
        if (rc < 0)
            return rc;
        CHECK(w->current < w->n_entries);
        enum model_dtype dtype = w->entries[w->current].t.dtype;
        CHECK(dtype == DTYPE_F32 || dtype == DTYPE_BF16 || dtype == DTYPE_F16);
        CHECK(count <= w->entries[w->current].t.elements - w->current_written);
        if (dtype == DTYPE_F32)
            return safetensors_writer_write_raw(w, values, count);
        uint16_t halves[CHUNK_ELEMENTS];
        uint64_t n = count < CHUNK_ELEMENTS ? count : CHUNK_ELEMENTS;
        if (dtype == DTYPE_BF16)
            dtype_f32_to_bf16(values, n, halves);
        else
            dtype_f32_to_f16(values, n, halves);
        rc = safetensors_writer_write_raw(w, halves, n);
        if (rc < 0)
            return rc;
        values += n;
        count -= n;
    }
    return 0;
}

/* ---- finishing ---- */

static json_t *make_index(const struct safetensors_writer *w)
{
    json_t *map = json_object();
    uint64_t total = 0;
    int failed = 0;
    for (uint64_t i = 0; i < w->n_entries; i++) {
        char name[64];
        shard_name(w, w->entries[i].t.file, name);
        failed |= json_object_set_new(map, w->entries[i].t.name, json_string(name));
        total += w->entries[i].t.bytes;
    }
    json_t *index =
        json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    if (failed) {
        json_decref(index);
        return NULL;
    }
    return index;
}

static int write_index(struct safetensors_writer *w)
{
    json_t *index = make_index(w);
    char *text = index ? json_dumps(index, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(index);
    if (!text)
        return error_set(ERROR_FAILED, "%s: no memory for the index of shards", w->folder);
    uint64_t bytes = strlen(text);
    text[bytes] = '\n'; /* over the terminating zero: the length is known */
    int rc = create_file(w, "model.safetensors.index.json");
    if (rc == 0)
        rc = write_at(w, text, bytes + 1, 0);
    if (rc == 0)
        rc = seal_file(w);
    free(text);
    return rc;
}

static int sync_folder(struct safetensors_writer *w)
{
    (void)snprintf(w->path, sizeof w->path, "%s", w->folder); /* fits: FOLDER_BYTES */
    w->fd = open(w->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return w->fd < 0 ? failed_at(w, "open") : seal_file(w);
}

int safetensors_writer_finish(struct safetensors_writer *w)
{
    CHECK(w->started);
    int rc = advance(w); /* tensors without elements at the end */
    if (rc < 0)
        return rc;
    CHECK(w->current == w->n_entries);
    if (w->n_shards > 1)
        rc = write_index(w);
    return rc < 0 ? rc : sync_folder(w);
}
