/*
 * A whole model folder: config.json, index and shards together (model/safetensors.h,
 * model/weights.h, io_worker/import.h, io_worker/export.h).
 *
 *     | u8 which file | u16 n | n bytes | ...        absent files are absent, the last of a name
 * counts
 *
 * Of what is accepted, every tensor lies where the index says, the tensors cover their files, all
 * pages can be made, and what is exported from them is bit for bit what was imported.
 */
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <sys/stat.h>

#include "io_worker/export.h"
#include "io_worker/import.h"
#include "model/json.h"
#include "model/safetensors.h"
#include "tests/fuzz/fuzz.h"

static const char *const names[] = {
    "config.json",     "model.safetensors.index.json",
    "m-1.safetensors", "m-2.safetensors",
    "m-3.safetensors", "model.safetensors",
    "tokenizer.json",
};

enum {
    CONFIG,
    INDEX,
    SHARD,
    SINGLE = 5,
    N_NAMES = 7,
    HEAD_BYTES = 3,
    PAGE = 4096,
    PARAMETERS_MAX = 1 << 16, /* a larger model is right, and slow */
};

static char folder[256], out[256];
static uint64_t sizes[N_NAMES]; /* of the files of this input */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_path(folder, sizeof folder, "m");
    fuzz_path(out, sizeof out, "out");
    REQUIRE(mkdir(folder, 0700) == 0 || errno == EEXIST); /* a merge starts again */
    return 0;
}

static void path_of(char path[512], const char *of, const char *name)
{
    int n = snprintf(path, 512, "%s/%s", of, name);
    REQUIRE(n > 0 && n < 512);
}

static void remove_files(const char *of)
{
    char path[512];
    DIR *dir = opendir(of);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        path_of(path, of, e->d_name);
        if (e->d_name[0] != '.')
            REQUIRE(unlink(path) == 0);
    }
    if (dir)
        REQUIRE(closedir(dir) == 0);
}

static void write_files(struct fuzz_input in)
{
    char path[512];
    remove_files(folder);
    memset(sizes, 0, sizeof sizes);
    while (in.left >= HEAD_BYTES) {
        unsigned which = fuzz_u8(&in) % N_NAMES;
        size_t n = fuzz_u8(&in);
        n |= (size_t)fuzz_u8(&in) << 8;
        n = n < in.left ? n : in.left;
        path_of(path, folder, names[which]);
        fuzz_write_file(path, in.bytes, n);
        sizes[which] = n;
        in.bytes += n;
        in.left -= n;
    }
}

static unsigned which_of(const struct safetensors *st, uint32_t file)
{
    const char *path = safetensors_file_path(st, file);
    REQUIRE(strncmp(path, folder, strlen(folder)) == 0);
    for (unsigned i = SHARD; i <= SINGLE; i++)
        if (strcmp(strrchr(path, '/') + 1, names[i]) == 0)
            return i;
    REQUIRE(0);
    return 0;
}

static uint64_t header_bytes(unsigned which)
{
    char path[512];
    uint64_t n;
    path_of(path, folder, names[which]);
    FILE *f = fopen(path, "rb");
    REQUIRE(f && fread(&n, sizeof n, 1, f) == 1 && fclose(f) == 0);
    return 8 + n;
}

/* Names differ, the index knows each, and each file is its header and its tensors. */
static void weights_are_sound(const struct safetensors *st)
{
    uint64_t covered[N_NAMES] = {0};
    json_t *index = NULL;
    if (which_of(st, 0) != SINGLE)
        REQUIRE(model_json_load_in(&index, folder, names[INDEX], 1 << 20) == 1);
    const json_t *map = json_object_get(index, "weight_map");
    REQUIRE(!index || json_object_size(map) == safetensors_n_tensors(st));
    for (uint64_t i = 0; i < safetensors_n_tensors(st); i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(st, i);
        unsigned which = which_of(st, t->file);
        REQUIRE(i == 0 || strcmp(safetensors_tensor_at(st, i - 1)->name, t->name) < 0);
        REQUIRE(!index ||
                strcmp(json_string_value(json_object_get(map, t->name)), names[which]) == 0);
        covered[which] += t->bytes;
    }
    for (unsigned i = SHARD; i <= SINGLE; i++)
        if (covered[i] > 0)
            REQUIRE(header_bytes(i) + covered[i] == sizes[i]);
    json_decref(index);
}

static int same_bits(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Every tensor of the layout, in the dtype that it had. */
static void export_is_the_source(const struct model_layout *layout,
                                 const struct safetensors *source)
{
    struct safetensors *made;
    REQUIRE(safetensors_open_folder(&made, out) == 0);
    REQUIRE(safetensors_n_tensors(made) == layout->n_tensors);
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        struct safetensors_tensor a, b;
        REQUIRE(safetensors_find(source, layout->tensors[i].name, &a) == 0);
        REQUIRE(safetensors_find(made, layout->tensors[i].name, &b) == 0);
        REQUIRE(a.dtype == b.dtype && a.n_dims == b.n_dims && a.elements == b.elements);
        REQUIRE(memcmp(a.shape, b.shape, a.n_dims * sizeof a.shape[0]) == 0);
        for (uint64_t k = 0; k < a.elements; k++) {
            float x, y;
            REQUIRE(safetensors_read(source, &a, k, 1, &x) == 0);
            REQUIRE(safetensors_read(made, &b, k, 1, &y) == 0);
            REQUIRE(isfinite(x) && same_bits(x, y));
        }
    }
    safetensors_close(made);
}

/* 0: exported; else refused, because a weight is no finite number. */
static int copy_pages(const struct model_layout *layout, struct import *im, int bf16)
{
    static float weights[PAGE];
    static uint16_t residual[PAGE];
    struct export *e;
    struct export_config to = {.layout = layout,
                               .model_folder = folder,
                               .weights_folder = folder,
                               .out = out,
                               .dtype = EXPORT_DTYPE_AUTO};
    remove_files(out);
    REQUIRE(export_open(&e, &to) == 0);
    for (uint64_t p = 0; p < layout->n_pages; p++) {
        uint16_t *low = bf16 ? residual : NULL;
        error_clear();
        int rc = import_page(im, &layout->pages[p], weights, low);
        if (rc < 0) {
            fuzz_refused(rc, FUZZ_USER);
            export_close(e);
            return rc;
        }
        REQUIRE(export_page(e, &layout->pages[p], weights, low) == 0);
    }
    REQUIRE(export_finish(e) == 0);
    export_close(e);
    return 0;
}

static void import_and_export(const struct model_layout *layout, const struct safetensors *st)
{
    struct import *im = NULL;
    struct import_config from = {.layout = layout, .folder = folder};
    error_clear();
    int rc = import_open(&im, &from);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
        REQUIRE(im == NULL);
        return;
    }
    for (int bf16 = 0; bf16 < 2 && copy_pages(layout, im, bf16) == 0; bf16++)
        export_is_the_source(layout, st);
    import_close(im);
}

/* Elements of the model, roughly, in floating point. */
static int is_small(const struct model_config *c)
{
    double width = (double)(c->n_heads * c->head_dim), hidden = (double)c->hidden_size;
    double experts = (double)(c->n_experts * c->expert_size);
    double block = hidden * (4 * width + 3 * ((double)c->intermediate_size + experts));
    return (double)c->n_layers * block + 2 * (double)c->vocab_size * hidden < PARAMETERS_MAX;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct model_config config;
    struct model_layout layout;
    struct safetensors *st = NULL;
    write_files(in);
    error_clear();
    int rc = safetensors_open_folder(&st, folder);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
        REQUIRE(st == NULL && strstr(error_text(), folder) != NULL);
        return 0;
    }
    if (safetensors_n_tensors(st) > 0)
        weights_are_sound(st);
    error_clear();
    rc = model_config_load(&config, folder);
    if (rc < 0)
        fuzz_refused(rc, FUZZ_USER);
    if (rc == 0 && is_small(&config) && config.n_layers < 16 &&
        model_layout_init(&layout, &config, PAGE) == 0) {
        import_and_export(&layout, st);
        model_layout_destroy(&layout);
    }
    safetensors_close(st);
    return 0;
}

/* ---- inputs ---- */

static size_t put_file(uint8_t *data, size_t at, unsigned which, const void *bytes, size_t n)
{
    data[at] = (uint8_t)which;
    data[at + 1] = (uint8_t)n;
    data[at + 2] = (uint8_t)(n >> 8);
    memcpy(data + at + HEAD_BYTES, bytes, n);
    return at + HEAD_BYTES + n;
}

static const char *const dtypes[] = {"F32", "BF16", "F16"};

/* One shard with the tensors whose turn it is; also their lines of the index. */
static size_t make_shard(uint8_t *bytes, const struct model_layout *layout, const uint8_t *place,
                         unsigned shard, uint64_t *random)
{
    char *text = (char *)bytes + 8;
    size_t n = 0, from = 0;
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        const struct model_tensor *t = &layout->tensors[i];
        if (place[i] != shard)
            continue;
        size_t k = fuzz_below(random, 3), to = from + t->elements * (k ? 2 : 4);
        char shape[64];
        (void)snprintf(shape, sizeof shape, t->dims == 2 ? "%u,%u" : "%u", (unsigned)t->rows,
                       (unsigned)t->cols);
        n += (size_t)sprintf(
            text + n, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            n ? ',' : '{', t->name, dtypes[k], shape, from, to);
        from = to;
    }
    n += (size_t)sprintf(text + n, n ? "}" : "{}");
    uint64_t header = n;
    memcpy(bytes, &header, sizeof header);
    memset(text + n, 0x3c, from);
    return 8 + n + from;
}

static size_t make_index(char *text, const struct model_layout *layout, const uint8_t *place)
{
    size_t n = (size_t)sprintf(text, "{\"weight_map\":{");
    for (uint32_t i = 0; i < layout->n_tensors; i++)
        n += (size_t)sprintf(text + n, "%s\"%s\":\"%s\"", i ? "," : "", layout->tensors[i].name,
                             names[place[i]]);
    return n + (size_t)sprintf(text + n, "}}");
}

/* config.json of a small model of a family at random. */
static size_t make_config(char *text, size_t room, uint64_t *random)
{
    static const char qwen3_moe[] = "{\"model_type\":\"qwen3_moe\",\"num_experts\":2,"
                                    "\"num_experts_per_tok\":1,\"moe_intermediate_size\":2";
    static const char *const families[] = {
        "{\"model_type\":\"llama\"",
        "{\"model_type\":\"qwen2\"",
        "{\"model_type\":\"qwen3\"",
        "{\"model_type\":\"phi3\"",
        "{\"model_type\":\"gemma2\"",
        "{\"model_type\":\"gemma3_text\"",
        "{\"model_type\":\"mixtral\",\"num_local_experts\":2",
        qwen3_moe,
    };
    const char *tied = fuzz_below(random, 2) ? "true" : "false";
    if (fuzz_below(random, 6) == 0)
        return (size_t)snprintf(text, room,
                                "{\"model_type\":\"gpt2\",\"vocab_size\":3,\"n_embd\":4,"
                                "\"n_layer\":1,\"n_head\":2,\"n_positions\":3,"
                                "\"tie_word_embeddings\":%s}",
                                tied);
    const char *family = families[fuzz_below(random, sizeof families / sizeof *families)];
    return (size_t)snprintf(text, room,
                            "%s,\"vocab_size\":3,\"hidden_size\":4,\"intermediate_size\":%u,"
                            "\"num_hidden_layers\":1,\"num_attention_heads\":%u,"
                            "\"num_key_value_heads\":1,\"head_dim\":2,\"pad_token_id\":null,"
                            "\"bos_token_id\":0,\"eos_token_id\":1,\"tie_word_embeddings\":%s}",
                            family, (unsigned)fuzz_below(random, 3) + 1,
                            (unsigned)fuzz_below(random, 2) + 1, tied);
}

/* A small model that is whole, in one file or in up to three. */
static size_t make_whole(uint8_t *data, size_t max_size, uint64_t *random)
{
    static uint8_t bytes[8192];
    uint8_t place[32];
    struct model_config config;
    struct model_layout layout;
    int single = fuzz_below(random, 3) == 0;
    size_t at = 0, n = make_config((char *)bytes, sizeof bytes, random);
    REQUIRE(model_config_parse(&config, (char *)bytes, n, "x") == 0);
    REQUIRE(model_layout_init(&layout, &config, PAGE) == 0 && layout.n_tensors <= sizeof place);
    if (max_size < 4096)
        return 0;
    at = put_file(data, at, CONFIG, bytes, n);
    for (uint32_t i = 0; i < layout.n_tensors; i++)
        place[i] = single ? SINGLE : (uint8_t)(SHARD + fuzz_below(random, 3));
    for (unsigned shard = SHARD; shard <= SINGLE; shard++)
        if (memchr(place, (int)shard, layout.n_tensors))
            at = put_file(data, at, shard, bytes, make_shard(bytes, &layout, place, shard, random));
    if (!single)
        at = put_file(data, at, INDEX, bytes, make_index((char *)bytes, &layout, place));
    model_layout_destroy(&layout);
    return at;
}

/* The length of the header in front is made that of the JSON that is there. */
static void fix_length(uint8_t *file, size_t size)
{
    uint64_t depth = 0;
    for (size_t i = 8; i < size; i++) {
        depth += file[i] == '{';
        if (file[i] == '}' && depth > 0 && --depth == 0) {
            uint64_t length = i + 1 - 8;
            memcpy(file, &length, sizeof length);
            return;
        }
    }
}

/* Where the record begins that `turn` falls on, and its bytes; 0 when there is none. */
static size_t find_record(const uint8_t *data, size_t size, uint64_t turn, size_t *at)
{
    size_t places[16], count = 0, end[16];
    for (size_t i = 0; i + HEAD_BYTES <= size && count < 16;) {
        size_t n = data[i + 1] | (size_t)data[i + 2] << 8;
        if (i + HEAD_BYTES + n > size)
            break;
        places[count] = i;
        i = end[count++] = i + HEAD_BYTES + n;
    }
    if (count == 0)
        return 0;
    *at = places[turn % count];
    return end[turn % count] - *at;
}

/* libFuzzer's own mutation of one file's bytes; the others stay as they are. */
static size_t mutate_record(uint8_t *data, size_t size, size_t max_size, size_t at, size_t n,
                            uint64_t *random)
{
    static uint8_t copy[8192];
    size_t old = n - HEAD_BYTES, room = max_size - size + old;
    if (room > sizeof copy)
        room = sizeof copy;
    memcpy(copy, data + at + HEAD_BYTES, old);
    size_t new = LLVMFuzzerMutate(copy, old, room);
    if (data[at] % N_NAMES >= SHARD && data[at] % N_NAMES <= SINGLE && new >= 16 &&
        fuzz_below(random, 4))
        fix_length(copy, new);
    memmove(data + at + HEAD_BYTES + new, data + at + n, size - at - n);
    (void)put_file(data, at, data[at], copy, new);
    return size - old + new;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    uint64_t random = seed;
    size_t at = 0, n = find_record(data, size, fuzz_random(&random), &at);
    if (n == 0 || fuzz_below(&random, 16) == 0) {
        size_t whole = make_whole(data, max_size, &random);
        return whole ? whole : LLVMFuzzerMutate(data, size, max_size);
    }
    switch (fuzz_below(&random, 12)) {
    case 0: /* one file less */
        memmove(data + at, data + at + n, size - at - n);
        return size - n;
    case 1: /* under another name */
        data[at] = (uint8_t)fuzz_below(&random, N_NAMES);
        return size;
    case 2: /* twice */
        if (size + n > max_size)
            return size;
        memcpy(data + size, data + at, n);
        data[size] = (uint8_t)(SHARD + fuzz_below(&random, 3));
        return size + n;
    default:
        return mutate_record(data, size, max_size, at, n, &random);
    }
}
