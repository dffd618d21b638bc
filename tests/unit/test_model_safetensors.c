/* safetensors: what is read, what is refused and how it is named, what is written. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/safetensors.h"
#include "model/weights.h"
#include "procs/error.h"

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/model_safetensors_XXXXXX");
    error_clear();
    return mkdtemp(folder) ? 0 : -1;
}

static const char *in_folder(const char *name)
{
    static char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int remove_folder(void **state)
{
    (void)state;
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (e->d_name[0] != '.')
            (void)remove(in_folder(e->d_name));
    return dir && closedir(dir) == 0 && rmdir(folder) == 0 ? 0 : -1;
}

static void write_file(const char *name, const void *data, size_t bytes)
{
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

/* Length prefix, header text, `data_bytes` bytes of data counting 0, 1, 2, ... */
static void write_tensors(const char *name, const char *header, size_t data_bytes)
{
    unsigned char bytes[4096];
    size_t n = strlen(header);
    assert_true(8 + n + data_bytes <= sizeof bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)n >> (8 * i));
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + n + i] = (unsigned char)i;
    write_file(name, bytes, 8 + n + data_bytes);
}

static void expect_refused(const char *words)
{
    struct safetensors *st;
    int rc = safetensors_open_folder(&st, folder);
    if (rc != -ERROR_USER || !strstr(error_text(), words))
        fail_msg("expected a refusal with \"%s\", got %d: %s", words, rc, error_text());
    assert_null(st);
}

static void expect_header_refused(const char *header, size_t data_bytes, const char *words)
{
    write_tensors("model.safetensors", header, data_bytes);
    expect_refused(words);
    assert_non_null(strstr(error_text(), "model.safetensors"));
}

#define T(name, dtype, shape, from, to)                                                            \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #from "," #to   \
    "]}"

static void tensors_are_found_with_shape_and_place(void **state)
{
    (void)state;
    struct safetensors *st;
    struct safetensors_tensor t;
    write_tensors("model.safetensors",
                  "{\"__metadata__\":{\"format\":\"pt\"}," T("w", "F32", "[2,1]", 4, 12) "," T(
                      "b", "BF16", "[2]", 0,
                      4) "," T("s", "I64", "[]", 12, 20) "," T("none", "F16", "[0,7]", 4, 4) "}   ",
                  20);
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    assert_int_equal(safetensors_n_tensors(st), 4);
    assert_string_equal(safetensors_tensor_at(st, 0)->name, "b");
    assert_string_equal(safetensors_tensor_at(st, 3)->name, "w");
    assert_int_equal(safetensors_find(st, "w", &t), 0);
    assert_int_equal(t.dtype, DTYPE_F32);
    assert_int_equal(t.n_dims, 2);
    assert_int_equal(t.shape[0], 2);
    assert_int_equal(t.bytes, 8);
    unsigned char raw[4];
    assert_int_equal(safetensors_read_raw(st, &t, 1, 1, raw), 0);
    assert_int_equal(raw[0], 8);
    assert_int_equal(safetensors_find(st, "s", &t), 0);
    assert_int_equal(t.n_dims, 0);
    assert_int_equal(t.elements, 1);
    float value;
    assert_int_equal(safetensors_read(st, &t, 0, 1, &value), -ERROR_USER);
    assert_non_null(strstr(error_text(), "I64"));
    assert_int_equal(safetensors_find(st, "none", &t), 0);
    assert_int_equal(t.elements, 0);
    assert_int_equal(safetensors_find(st, "x", &t), -1);
    safetensors_close(st);
}

static void a_file_without_tensors_is_a_file(void **state)
{
    (void)state;
    struct safetensors *st;
    struct safetensors_tensor t;
    write_tensors("model.safetensors", "{}", 0);
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    assert_int_equal(safetensors_n_tensors(st), 0);
    assert_int_equal(safetensors_find(st, "a", &t), -1);
    safetensors_close(st);
    expect_header_refused("{}", 1, "trailing bytes");
}

/* The file shrinks after it was opened: the read says so, it does not return old memory. */
static void a_read_past_the_end_of_a_shrunken_file_is_an_error(void **state)
{
    (void)state;
    struct safetensors *st;
    struct safetensors_tensor t;
    float values[2];
    write_tensors("model.safetensors", "{" T("a", "F32", "[2]", 0, 8) "}", 8);
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    assert_int_equal(safetensors_find(st, "a", &t), 0);
    assert_int_equal(truncate(in_folder("model.safetensors"), (off_t)t.offset + 5), 0);
    assert_int_equal(safetensors_read(st, &t, 0, 2, values), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "tensor a: "));
    safetensors_close(st);
}

static void absurd_header_lengths_are_refused(void **state)
{
    (void)state;
    write_file("model.safetensors", "\0\0\0\0", 4);
    expect_refused("at least 8 bytes");
    write_file("model.safetensors", "\x03\0\0\0\0\0\0\0{}", 10);
    expect_refused("header length: expected 2 to 2 bytes, found 3");
    write_file("model.safetensors", "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    expect_refused("found 18446744073709551615");
    write_file("model.safetensors", "\0\0\0\0\0\0\0\0{}", 10);
    expect_refused("found 0");
    write_file("model.safetensors", "\x02\0\0\0\0\0\0\0[]", 10);
    expect_refused("expected {");
    /* a header of 100 MB and one byte, in a file (with a hole) that is large enough */
    write_file("model.safetensors", "\x01\xe1\xf5\x05\0\0\0\0{}", 10);
    assert_int_equal(truncate(in_folder("model.safetensors"), 100000100), 0);
    expect_refused("expected 2 to 100000000 bytes, found 100000001");
}

static void broken_headers_are_refused(void **state)
{
    (void)state;
    expect_header_refused("{\"a\":}", 0, "(header):1:6: not valid JSON");
    expect_header_refused("{" T("a", "F32", "[1]", 0, 4) "," T("a", "F32", "[1]", 0, 4) "}", 4,
                          "duplicate");
    expect_header_refused("{\"a\":3}", 0, "tensor a: expected an object");
    expect_header_refused("{" T("a", "F4", "[1]", 0, 4) "}", 4, "tensor a: expected a known dtype");
    expect_header_refused("{" T("a", "F32", "1", 0, 4) "}", 4, "expected an array as shape");
    expect_header_refused("{" T("a", "F32", "[-1]", 0, 4) "}", 4, "found [-1]");
    expect_header_refused("{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4,
                          "at most 8 dimensions");
    expect_header_refused("{" T("a", "F32", "[1]", 4, 0) "}", 4, "data_offsets");
    expect_header_refused("{" T("a", "F32", "[1]", -4, 0) "}", 4, "data_offsets");
    expect_header_refused("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__");
}

static void shapes_that_do_not_fit_their_bytes_are_refused(void **state)
{
    (void)state;
    expect_header_refused("{" T("a", "F32", "[2]", 0, 4) "}", 4,
                          "tensor a: expected 8 bytes for 2 elements of F32, found 4");
    expect_header_refused("{" T("a", "F32", "[4294967296,4294967296]", 0, 4) "}", 4,
                          "fewer than 2^64 elements");
    expect_header_refused("{" T("a", "F32", "[4611686018427387904]", 0, 0) "}", 0,
                          "fewer than 2^64 bytes");
}

static void data_must_be_covered_without_hole_overlap_or_rest(void **state)
{
    (void)state;
    expect_header_refused("{" T("a", "F32", "[1]", 0, 4) "," T("b", "F32", "[1]", 8, 12) "}", 12,
                          "tensor b: hole before it");
    expect_header_refused("{" T("a", "F32", "[1]", 4, 8) "}", 8, "tensor a: hole before it");
    expect_header_refused("{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[1]", 4, 8) "}", 8,
                          "tensor b: overlaps");
    expect_header_refused("{" T("a", "F32", "[1]", 0, 4) "," T("b", "F32", "[1]", 0, 4) "}", 4,
                          "overlaps");
    expect_header_refused("{" T("a", "F32", "[1]", 0, 4) "}", 5, "trailing bytes");
    expect_header_refused("{" T("a", "F32", "[1]", 0, 4) "}", 3, "cut short");
}

static void an_empty_folder_is_refused_with_a_hint(void **state)
{
    (void)state;
    expect_refused("found neither");
    assert_non_null(strstr(error_text(), "hint:"));
}

static void write_index(const char *weight_map)
{
    char text[1024];
    int n = snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":8},\"weight_map\":%s}",
                     weight_map);
    write_file("model.safetensors.index.json", text, (size_t)n);
}

static void shards_are_read_through_their_index(void **state)
{
    (void)state;
    struct safetensors *st;
    struct safetensors_tensor t;
    unsigned char raw[4];
    write_tensors("m-1.safetensors",
                  "{" T("a", "F32", "[1]", 0, 4) "," T("c", "F32", "[1]", 4, 8) "}", 8);
    write_tensors("m-2.safetensors", "{" T("b", "F32", "[1]", 0, 4) "}", 4);
    write_index("{\"a\":\"m-1.safetensors\",\"b\":\"m-2.safetensors\",\"c\":\"m-1.safetensors\"}");
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    assert_int_equal(safetensors_n_tensors(st), 3);
    assert_int_equal(safetensors_find(st, "c", &t), 0);
    assert_int_equal(safetensors_read_raw(st, &t, 0, 1, raw), 0);
    assert_int_equal(raw[3], 7);
    assert_int_equal(safetensors_find(st, "b", &t), 0);
    assert_non_null(strstr(safetensors_file_path(st, t.file), "m-2.safetensors"));
    safetensors_close(st);
}

static void an_index_that_lies_is_refused(void **state)
{
    (void)state;
    write_tensors("m-1.safetensors", "{" T("a", "F32", "[1]", 0, 4) "}", 4);
    write_tensors("m-2.safetensors", "{" T("b", "F32", "[1]", 0, 4) "}", 4);
    write_tensors("m-3.safetensors", "{" T("a", "F32", "[1]", 0, 4) "}", 4);
    write_index("{\"a\":\"m-1.safetensors\",\"b\":\"m-9.safetensors\"}");
    expect_refused("m-9.safetensors: expected the shard that the index names, found no file");
    write_index("{\"a\":\"m-1.safetensors\",\"z\":\"m-2.safetensors\",\"b\":\"m-2.safetensors\"}");
    expect_refused("tensor z: expected in m-2.safetensors, found nowhere");
    write_index("{\"a\":\"m-2.safetensors\",\"b\":\"m-1.safetensors\"}");
    expect_refused("tensor a: expected in m-2.safetensors, found in m-1.safetensors");
    write_index("{\"a\":\"m-1.safetensors\",\"b\":\"m-3.safetensors\"}");
    expect_refused("tensor a: expected in m-1.safetensors, found in m-3.safetensors");
    write_index("{\"a\":\"../m-1.safetensors\"}");
    expect_refused("found \"../m-1.safetensors\"");
    write_index("{\"a\":\"m-1.bin\"}");
    expect_refused("found \"m-1.bin\"");
    write_index("{\"a\":7}");
    expect_refused("found 7");
    write_index("{\"b\":\"m-2.safetensors\",\"b\":\"m-2.safetensors\"}");
    expect_refused("duplicate");
    write_index("{}");
    expect_refused("weight_map");
    write_tensors("m-2.safetensors",
                  "{" T("b", "F32", "[1]", 0, 4) "," T("x", "U8", "[1]", 4, 5) "}", 5);
    write_index("{\"b\":\"m-2.safetensors\"}");
    expect_refused("tensor x: expected in the index");
}

/* ---- writing ---- */

static struct safetensors_writer *open_writer(uint64_t shard_bytes_max)
{
    struct safetensors_writer *w;
    assert_int_equal(safetensors_writer_open(&w, folder, shard_bytes_max), 0);
    return w;
}

static void declare(struct safetensors_writer *w, const char *name, enum model_dtype dtype,
                    uint64_t rows, uint64_t cols)
{
    uint64_t shape[2] = {rows, cols};
    assert_int_equal(safetensors_writer_declare(w, name, dtype, cols ? 2 : 1, shape), 0);
}

/* The bytes below were written by the reference implementation (safetensors 0.8, Python):
 * save({"b": f16 arange(3), "a\"/é": f32 [[1, 2], [3, 4]], "c": f32 7 (scalar), "d": u8 arange(5),
 *       "e": f32 zeros (0, 4), "i": i64 arange(1)}, {"format": "pt"}) */
static const unsigned char reference[] = {
    0x70, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x7b, 0x22, 0x5f, 0x5f, 0x6d, 0x65, 0x74, 0x61,
    0x64, 0x61, 0x74, 0x61, 0x5f, 0x5f, 0x22, 0x3a, 0x7b, 0x22, 0x66, 0x6f, 0x72, 0x6d, 0x61, 0x74,
    0x22, 0x3a, 0x22, 0x70, 0x74, 0x22, 0x7d, 0x2c, 0x22, 0x69, 0x22, 0x3a, 0x7b, 0x22, 0x64, 0x74,
    0x79, 0x70, 0x65, 0x22, 0x3a, 0x22, 0x49, 0x36, 0x34, 0x22, 0x2c, 0x22, 0x73, 0x68, 0x61, 0x70,
    0x65, 0x22, 0x3a, 0x5b, 0x31, 0x5d, 0x2c, 0x22, 0x64, 0x61, 0x74, 0x61, 0x5f, 0x6f, 0x66, 0x66,
    0x73, 0x65, 0x74, 0x73, 0x22, 0x3a, 0x5b, 0x30, 0x2c, 0x38, 0x5d, 0x7d, 0x2c, 0x22, 0x61, 0x5c,
    0x22, 0x2f, 0xc3, 0xa9, 0x22, 0x3a, 0x7b, 0x22, 0x64, 0x74, 0x79, 0x70, 0x65, 0x22, 0x3a, 0x22,
    0x46, 0x33, 0x32, 0x22, 0x2c, 0x22, 0x73, 0x68, 0x61, 0x70, 0x65, 0x22, 0x3a, 0x5b, 0x32, 0x2c,
    0x32, 0x5d, 0x2c, 0x22, 0x64, 0x61, 0x74, 0x61, 0x5f, 0x6f, 0x66, 0x66, 0x73, 0x65, 0x74, 0x73,
    0x22, 0x3a, 0x5b, 0x38, 0x2c, 0x32, 0x34, 0x5d, 0x7d, 0x2c, 0x22, 0x63, 0x22, 0x3a, 0x7b, 0x22,
    0x64, 0x74, 0x79, 0x70, 0x65, 0x22, 0x3a, 0x22, 0x46, 0x33, 0x32, 0x22, 0x2c, 0x22, 0x73, 0x68,
    0x61, 0x70, 0x65, 0x22, 0x3a, 0x5b, 0x5d, 0x2c, 0x22, 0x64, 0x61, 0x74, 0x61, 0x5f, 0x6f, 0x66,
    0x66, 0x73, 0x65, 0x74, 0x73, 0x22, 0x3a, 0x5b, 0x32, 0x34, 0x2c, 0x32, 0x38, 0x5d, 0x7d, 0x2c,
    0x22, 0x65, 0x22, 0x3a, 0x7b, 0x22, 0x64, 0x74, 0x79, 0x70, 0x65, 0x22, 0x3a, 0x22, 0x46, 0x33,
    0x32, 0x22, 0x2c, 0x22, 0x73, 0x68, 0x61, 0x70, 0x65, 0x22, 0x3a, 0x5b, 0x30, 0x2c, 0x34, 0x5d,
    0x2c, 0x22, 0x64, 0x61, 0x74, 0x61, 0x5f, 0x6f, 0x66, 0x66, 0x73, 0x65, 0x74, 0x73, 0x22, 0x3a,
    0x5b, 0x32, 0x38, 0x2c, 0x32, 0x38, 0x5d, 0x7d, 0x2c, 0x22, 0x62, 0x22, 0x3a, 0x7b, 0x22, 0x64,
    0x74, 0x79, 0x70, 0x65, 0x22, 0x3a, 0x22, 0x46, 0x31, 0x36, 0x22, 0x2c, 0x22, 0x73, 0x68, 0x61,
    0x70, 0x65, 0x22, 0x3a, 0x5b, 0x33, 0x5d, 0x2c, 0x22, 0x64, 0x61, 0x74, 0x61, 0x5f, 0x6f, 0x66,
    0x66, 0x73, 0x65, 0x74, 0x73, 0x22, 0x3a, 0x5b, 0x32, 0x38, 0x2c, 0x33, 0x34, 0x5d, 0x7d, 0x2c,
    0x22, 0x64, 0x22, 0x3a, 0x7b, 0x22, 0x64, 0x74, 0x79, 0x70, 0x65, 0x22, 0x3a, 0x22, 0x55, 0x38,
    0x22, 0x2c, 0x22, 0x73, 0x68, 0x61, 0x70, 0x65, 0x22, 0x3a, 0x5b, 0x35, 0x5d, 0x2c, 0x22, 0x64,
    0x61, 0x74, 0x61, 0x5f, 0x6f, 0x66, 0x66, 0x73, 0x65, 0x74, 0x73, 0x22, 0x3a, 0x5b, 0x33, 0x34,
    0x2c, 0x33, 0x39, 0x5d, 0x7d, 0x7d, 0x20, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0x40, 0x00, 0x00, 0x40, 0x40, 0x00, 0x00, 0x80, 0x40,
    0x00, 0x00, 0xe0, 0x40, 0x00, 0x00, 0x00, 0x3c, 0x00, 0x40, 0x00, 0x01, 0x02, 0x03, 0x04};

static void files_are_byte_for_byte_those_of_the_reference(void **state)
{
    (void)state;
    struct safetensors_writer *w = open_writer(SAFETENSORS_SHARD_BYTES_DEFAULT);
    const float values[] = {1, 2, 3, 4, 7, 0, 1, 2};
    const unsigned char five[] = {0, 1, 2, 3, 4};
    const int64_t zero = 0;
    declare(w, "b", DTYPE_F16, 3, 0);
    declare(w, "a\"/\xc3\xa9", DTYPE_F32, 2, 2);
    assert_int_equal(safetensors_writer_declare(w, "c", DTYPE_F32, 0, NULL), 0);
    declare(w, "d", DTYPE_U8, 5, 0);
    uint64_t empty[2] = {0, 4};
    assert_int_equal(safetensors_writer_declare(w, "e", DTYPE_F32, 2, empty), 0);
    declare(w, "i", DTYPE_I64, 1, 0);
    assert_int_equal(safetensors_writer_start(w), 0);
    assert_int_equal(safetensors_writer_bytes(w), sizeof reference);
    assert_int_equal(safetensors_writer_write(w, &values[5], 1), 0);
    assert_int_equal(safetensors_writer_write(w, &values[6], 2), 0);
    assert_int_equal(safetensors_writer_write(w, values, 4), 0);
    assert_int_equal(safetensors_writer_write(w, &values[4], 1), 0);
    assert_int_equal(safetensors_writer_write_raw(w, five, 5), 0);
    assert_int_equal(safetensors_writer_write_raw(w, &zero, 1), 0);
    assert_int_equal(safetensors_writer_finish(w), 0);
    safetensors_writer_close(w);

    unsigned char found[sizeof reference + 1];
    FILE *f = fopen(in_folder("model.safetensors"), "rb");
    assert_non_null(f);
    assert_int_equal(fread(found, 1, sizeof found, f), sizeof reference);
    assert_int_equal(fclose(f), 0);
    assert_memory_equal(found, reference, sizeof reference);
}

enum { ROWS = 300, COLS = 151, N = ROWS * COLS }; /* more than one chunk of conversion */

static float expected_value(uint64_t i)
{
    return (float)((double)i * 0.37 - 5000.0);
}

/* Writes three tensors in uneven chunks, shards of at most `shard_bytes_max`. */
static void write_three(uint64_t shard_bytes_max)
{
    static const enum model_dtype dtypes[] = {DTYPE_BF16, DTYPE_F32, DTYPE_F16};
    static float values[N];
    struct safetensors_writer *w = open_writer(shard_bytes_max);
    for (uint64_t i = 0; i < N; i++)
        values[i] = expected_value(i);
    for (int t = 0; t < 3; t++)
        declare(w, (const char *[]){"t0", "t1", "t2"}[t], dtypes[t], ROWS, COLS);
    assert_int_equal(safetensors_writer_start(w), 0);
    for (int t = 0; t < 3; t++)
        for (uint64_t i = 0, n; i < N; i += n) {
            n = i == 0 ? 1 : N - i < 20011 ? N - i : 20011;
            assert_int_equal(safetensors_writer_write(w, &values[i], n), 0);
        }
    assert_int_equal(safetensors_writer_finish(w), 0);
    safetensors_writer_close(w);
}

static void check_three(void)
{
    static float found[N];
    struct safetensors *st;
    struct safetensors_tensor t;
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    assert_int_equal(safetensors_n_tensors(st), 3);
    for (uint64_t k = 0; k < 3; k++) {
        assert_int_equal(safetensors_find(st, (const char *[]){"t0", "t1", "t2"}[k], &t), 0);
        assert_int_equal(safetensors_read(st, &t, 0, 77, found), 0);
        assert_int_equal(safetensors_read(st, &t, 77, N - 77, &found[77]), 0);
        for (uint64_t i = 0; i < N; i++) {
            float value = expected_value(i), rounded = value;
            uint16_t half;
            if (k == 0) {
                dtype_f32_to_bf16(&value, 1, &half);
                dtype_bf16_to_f32(&half, 1, &rounded);
            } else if (k == 2) {
                dtype_f32_to_f16(&value, 1, &half);
                dtype_f16_to_f32(&half, 1, &rounded);
            }
            if (found[i] != rounded)
                fail_msg("tensor %d element %d: %g, not %g", (int)k, (int)i, (double)found[i],
                         (double)rounded);
        }
    }
    safetensors_close(st);
}

static void what_is_written_is_read_back_in_every_float_dtype(void **state)
{
    (void)state;
    write_three(SAFETENSORS_SHARD_BYTES_DEFAULT);
    check_three();
    assert_int_equal(access(in_folder("model.safetensors.index.json"), F_OK), -1);
}

static void shards_are_cut_by_size_and_indexed(void **state)
{
    (void)state;
    write_three((uint64_t)N * 6); /* t0 and t1 fill one exactly, t2 starts another */
    check_three();
    assert_int_equal(access(in_folder("model-00001-of-00002.safetensors"), F_OK), 0);
    assert_int_equal(access(in_folder("model-00002-of-00002.safetensors"), F_OK), 0);
    assert_int_equal(access(in_folder("model.safetensors"), F_OK), -1);
    char text[1024] = {0};
    FILE *f = fopen(in_folder("model.safetensors.index.json"), "r");
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    assert_int_equal(fclose(f), 0);
    assert_string_equal(text, "{\n  \"metadata\": {\n    \"total_size\": 362400\n  },\n"
                              "  \"weight_map\": {\n"
                              "    \"t0\": \"model-00001-of-00002.safetensors\",\n"
                              "    \"t1\": \"model-00001-of-00002.safetensors\",\n"
                              "    \"t2\": \"model-00002-of-00002.safetensors\"\n  }\n}\n");
}

static void a_tensor_larger_than_a_shard_has_one_of_its_own(void **state)
{
    (void)state;
    write_three(1000);
    check_three();
    assert_int_equal(access(in_folder("model-00003-of-00003.safetensors"), F_OK), 0);
}

static void a_name_declared_twice_is_refused(void **state)
{
    (void)state;
    struct safetensors_writer *w = open_writer(1000);
    declare(w, "a", DTYPE_F32, 1, 0);
    declare(w, "b", DTYPE_F32, 1, 0);
    declare(w, "a", DTYPE_F32, 1, 0);
    assert_int_equal(safetensors_writer_start(w), -ERROR_USER);
    assert_non_null(strstr(error_text(), "tensor a: expected once"));
    safetensors_writer_close(w);
}

static void existing_weights_are_never_overwritten(void **state)
{
    (void)state;
    struct safetensors_writer *w = open_writer(1000);
    float one = 1;
    write_file("model.safetensors", "x", 1);
    declare(w, "a", DTYPE_F32, 1, 0);
    assert_int_equal(safetensors_writer_start(w), 0);
    assert_int_equal(safetensors_writer_write(w, &one, 1), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "cannot create"));
    safetensors_writer_close(w);
}

/* ---- a checkpoint against a layout ---- */

enum { WITHOUT_HEAD = 1, WITH_ROTARY = 2, WITH_BIAS = 4, WRONG_SHAPE = 8, TRANSPOSED = 16 };

static void write_model(const struct model_layout *layout, int how)
{
    struct safetensors_writer *w = open_writer(SAFETENSORS_SHARD_BYTES_DEFAULT);
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        const struct model_tensor *t = &layout->tensors[i];
        uint64_t rows = t->rows, cols = t->dims == 2 ? t->cols : 0;
        if (t->role == MODEL_HEAD && (how & WITHOUT_HEAD))
            continue;
        if (t->role == MODEL_FINAL_NORM && (how & WRONG_SHAPE))
            rows++;
        if (t->role == MODEL_GATE && (how & TRANSPOSED))
            rows = t->cols, cols = t->rows;
        declare(w, t->name, DTYPE_F32, rows, cols);
    }
    if (how & WITH_ROTARY)
        declare(w, "model.layers.0.self_attn.rotary_emb.inv_freq", DTYPE_F32, 4, 0);
    if (how & WITH_BIAS)
        declare(w, "model.layers.0.self_attn.q_proj.bias", DTYPE_F32, 64, 0);
    if (layout->config.tie_word_embeddings && !(how & WITHOUT_HEAD))
        declare(w, "lm_head.weight", DTYPE_F32, 3, 3);
    assert_int_equal(safetensors_writer_start(w), 0);
    static const float zeros[64];
    for (uint64_t n; (n = safetensors_writer_missing(w)) > 0;) {
        assert_int_equal(safetensors_writer_write(w, zeros, n < 64 ? n : 64), 0);
    }
    assert_int_equal(safetensors_writer_finish(w), 0);
    safetensors_writer_close(w);
}

static int check_model(uint32_t tied, int how)
{
    struct model_config config = {
        .vocab_size = 20,
        .hidden_size = 8,
        .intermediate_size = 12,
        .n_layers = 2,
        .n_heads = 2,
        .n_kv_heads = 1,
        .head_dim = 4,
        .tie_word_embeddings = tied,
    };
    struct model_layout layout;
    struct safetensors *st;
    assert_int_equal(model_layout_init(&layout, &config, 4096), 0);
    (void)remove(in_folder("model.safetensors"));
    write_model(&layout, how);
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    int rc = model_check_weights(&layout, st);
    safetensors_close(st);
    model_layout_destroy(&layout);
    return rc;
}

static void a_fitting_checkpoint_is_accepted(void **state)
{
    (void)state;
    assert_int_equal(check_model(0, 0), 0);
    assert_int_equal(check_model(0, WITH_ROTARY), 0);
    assert_int_equal(check_model(1, WITHOUT_HEAD), 0);
    assert_int_equal(check_model(1, 0), 0); /* a head beside tied embeddings is left aside */
}

static void a_checkpoint_of_another_model_is_refused_by_tensor(void **state)
{
    (void)state;
    assert_int_equal(check_model(0, WITHOUT_HEAD), -ERROR_USER);
    assert_non_null(strstr(error_text(), "tensor lm_head.weight: expected in the weights"));
    assert_non_null(strstr(error_text(), "tie_word_embeddings"));
    assert_int_equal(check_model(0, WITH_BIAS), -ERROR_USER);
    assert_non_null(strstr(error_text(), "q_proj.bias: expected no such tensor"));
    assert_int_equal(check_model(0, WRONG_SHAPE), -ERROR_USER);
    assert_non_null(strstr(error_text(), "model.norm.weight: expected shape [8], found [9]"));
    assert_int_equal(check_model(0, TRANSPOSED), -ERROR_USER);
    assert_non_null(strstr(error_text(), "expected shape [12, 8], found [8, 12]"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(tensors_are_found_with_shape_and_place),
        TEST(a_file_without_tensors_is_a_file),
        TEST(a_read_past_the_end_of_a_shrunken_file_is_an_error),
        TEST(absurd_header_lengths_are_refused),
        TEST(broken_headers_are_refused),
        TEST(shapes_that_do_not_fit_their_bytes_are_refused),
        TEST(data_must_be_covered_without_hole_overlap_or_rest),
        TEST(an_empty_folder_is_refused_with_a_hint),
        TEST(shards_are_read_through_their_index),
        TEST(an_index_that_lies_is_refused),
        TEST(files_are_byte_for_byte_those_of_the_reference),
        TEST(what_is_written_is_read_back_in_every_float_dtype),
        TEST(shards_are_cut_by_size_and_indexed),
        TEST(a_tensor_larger_than_a_shard_has_one_of_its_own),
        TEST(a_name_declared_twice_is_refused),
        TEST(existing_weights_are_never_overwritten),
        TEST(a_fitting_checkpoint_is_accepted),
        TEST(a_checkpoint_of_another_model_is_refused_by_tensor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
