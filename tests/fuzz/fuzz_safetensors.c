/*
 * One file of weights: the safetensors header and what it says of the data (model/safetensors.h).
 *
 *     the file's bytes
 *
 * Of what is accepted every tensor can be found and read, and they cover the data exactly once.
 */
#include "model/safetensors.h"
#include "tests/fuzz/fuzz.h"

static char path[256];

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_path(path, sizeof path, "model.safetensors");
    return 0;
}

static int converts(enum model_dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_BF16 || dtype == DTYPE_F16;
}

static void read_whole(const struct safetensors *st, const struct safetensors_tensor *t,
                       const uint8_t *data)
{
    uint8_t *raw = malloc(t->bytes ? t->bytes : 1);
    float *values = malloc(t->elements ? t->elements * sizeof *values : 1);
    REQUIRE(raw && values && safetensors_read_raw(st, t, 0, t->elements, raw) == 0);
    REQUIRE(memcmp(raw, data + t->offset, t->bytes) == 0);
    error_clear();
    int rc = safetensors_read(st, t, 0, t->elements, values);
    if (rc < 0)
        fuzz_refused(rc, FUZZ_USER);
    REQUIRE((rc == 0) == converts(t->dtype));
    free(raw);
    free(values);
}

static void accepted(const struct safetensors *st, const uint8_t *data, size_t size)
{
    uint64_t n = safetensors_n_tensors(st), covered = 0, header;
    memcpy(&header, data, sizeof header);
    for (uint64_t i = 0; i < n; i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(st, i);
        struct safetensors_tensor found;
        uint64_t elements = 1;
        for (uint32_t k = 0; k < t->n_dims; k++)
            elements *= t->shape[k];
        REQUIRE(t->n_dims <= SAFETENSORS_DIMS_MAX && elements == t->elements);
        REQUIRE(t->bytes == elements * model_dtype_bytes(t->dtype));
        REQUIRE(t->offset >= 8 + header && t->offset <= size && t->bytes <= size - t->offset);
        REQUIRE(safetensors_find(st, t->name, &found) == 0);
        REQUIRE(strcmp(found.name, t->name) == 0 && found.offset == t->offset);
        REQUIRE(i == 0 || strcmp(safetensors_tensor_at(st, i - 1)->name, t->name) < 0);
        for (uint64_t j = 0; j < i; j++) {
            const struct safetensors_tensor *other = safetensors_tensor_at(st, j);
            REQUIRE(other->offset + other->bytes <= t->offset ||
                    t->offset + t->bytes <= other->offset);
        }
        covered += t->bytes;
        read_whole(st, t, data);
    }
    REQUIRE(8 + header + covered == size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors *st = NULL;
    fuzz_write_file(path, data, size);
    error_clear();
    int rc = safetensors_open_file(&st, path);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
        REQUIRE(st == NULL && strstr(error_text(), path) != NULL);
        return 0;
    }
    accepted(st, data, size);
    safetensors_close(st);
    return 0;
}

/* The length of the header in front is made that of the JSON that is there. */
static size_t fix_length(uint8_t *data, size_t size)
{
    uint64_t depth = 0, end = 0;
    for (size_t i = 8; i < size && end == 0; i++) {
        depth += data[i] == '{';
        if (data[i] == '}' && depth > 0 && --depth == 0)
            end = i + 1;
    }
    if (end) {
        end -= 8;
        memcpy(data, &end, sizeof end);
    }
    return size;
}

/* A small file that is whole, to begin with. */
static size_t make_whole(uint8_t *data, size_t max_size, uint64_t *random)
{
    static const char *const dtypes[] = {"F32", "BF16", "F16", "I64", "U8"};
    static const unsigned bytes[] = {4, 2, 2, 8, 1};
    char json[512];
    uint64_t k = fuzz_below(random, 5), l = fuzz_below(random, 5);
    unsigned a = (unsigned)fuzz_below(random, 5), b = (unsigned)fuzz_below(random, 3);
    unsigned middle = a * bytes[k], last = middle + 2 * b * bytes[l];
    int n = snprintf(json, sizeof json,
                     "{\"__metadata__\":{\"format\":\"pt\"},"
                     "\"a\":{\"dtype\":\"%s\",\"shape\":[%u],\"data_offsets\":[0,%u]},"
                     "\"b.c\":{\"dtype\":\"%s\",\"shape\":[%u,2],\"data_offsets\":[%u,%u]}}",
                     dtypes[k], a, middle, dtypes[l], b, middle, last);
    uint64_t header = (uint64_t)n;
    if (8 + header + last > max_size)
        return 0;
    memcpy(data, &header, sizeof header);
    memcpy(data + 8, json, header);
    memset(data + 8 + header, 0x3f, last);
    return 8 + header + last;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    uint64_t random = seed;
    if (size < 16 || fuzz_below(&random, 16) == 0) {
        size_t whole = make_whole(data, max_size, &random);
        return whole ? whole : LLVMFuzzerMutate(data, size, max_size);
    }
    size = LLVMFuzzerMutate(data, size, max_size);
    return fuzz_below(&random, 4) ? fix_length(data, size) : size;
}
