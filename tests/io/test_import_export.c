/*
 * Import and export: what goes in comes out, bit for bit, however it was cut into pages; an export
 * is whole or absent.
 */
#include "tests/io/data_fixture.h"

#include <dirent.h>
#include <math.h>
#include <stdint.h>
#include <sys/stat.h>

#include "io_worker/export.h"
#include "io_worker/folder.h"
#include "io_worker/import.h"
#include "model/config_dtype.h"
#include "model/folder_file.h"
#include "model/safetensors.h"
#include "model/split.h"
#include "model/weights.h"

#define GOLDEN   "tests/goldens/llama_tied_packed"
#define UNTIED   "tests/goldens/llama_untied_packed"
#define PAGE_MAX 65536u

enum compute { FLOAT32, BFLOAT16 };

static uint16_t residual[PAGE_MAX];
static float weights[PAGE_MAX]; /* f32, or bf16 in its first half */

static const char *in_fixture(const char *name)
{
    static char paths[16][160];
    static unsigned next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", fixture_directory, name);
    return path;
}

static void load_layout(struct model_layout *layout, const char *folder, uint64_t page_elements)
{
    struct model_config config;
    if (model_config_load(&config, folder) < 0 ||
        model_layout_init(layout, &config, page_elements) < 0)
        fail_msg("%s", error_text());
}

/* Pages of `source` straight into an export; only the first `pages`, then closed, if fewer. */
static int copy_model(const struct import_config *from, const struct export_config *to,
                      enum compute compute, uint64_t pages)
{
    struct import *im;
    struct export *e;
    const struct model_layout *layout = from->layout;
    if (import_open(&im, from) < 0)
        fail_msg("%s", error_text());
    int rc = export_open(&e, to);
    if (rc == 0) {
        for (uint64_t p = 0; p < layout->n_pages && p < pages && rc == 0; p++) {
            const struct model_page *page = &layout->pages[p];
            memset(weights, 0xff, sizeof weights); /* padding must be made, not found */
            memset(residual, 0xff, sizeof residual);
            assert_true(page->elements <= PAGE_MAX);
            uint16_t *low = compute == BFLOAT16 ? residual : NULL;
            if (import_page(im, page, weights, low) < 0)
                fail_msg("%s", error_text());
            rc = export_page(e, page, weights, low);
        }
        if (rc == 0 && pages >= layout->n_pages)
            rc = export_finish(e);
        export_close(e);
    }
    import_close(im);
    return rc;
}

static void copied(const struct import_config *from, const struct export_config *to,
                   enum compute compute)
{
    if (copy_model(from, to, compute, UINT64_MAX) < 0)
        fail_msg("%s", error_text());
}

static void same_file(const char *a, const char *b, const char *name)
{
    char command[512];
    snprintf(command, sizeof command, "cmp %s/%s %s/%s", a, name, b, name);
    assert_int_equal(system(command), 0);
}

/* Every tensor of b is in a, with the same dtype and bits; and as many. */
static void same_tensors(const char *a, const char *b)
{
    struct safetensors *sa, *sb;
    if (safetensors_open_folder(&sa, a) < 0 || safetensors_open_folder(&sb, b) < 0)
        fail_msg("%s", error_text());
    assert_int_equal(safetensors_n_tensors(sa), safetensors_n_tensors(sb));
    for (uint64_t i = 0; i < safetensors_n_tensors(sa); i++) {
        const struct safetensors_tensor *ta = safetensors_tensor_at(sa, i);
        const struct safetensors_tensor *tb = safetensors_tensor_at(sb, i);
        assert_string_equal(ta->name, tb->name);
        assert_int_equal(ta->dtype, tb->dtype);
        assert_int_equal(ta->elements, tb->elements);
        assert_int_equal(ta->n_dims, tb->n_dims);
        assert_memory_equal(ta->shape, tb->shape, ta->n_dims * sizeof ta->shape[0]);
        void *ba = malloc(ta->bytes), *bb = malloc(tb->bytes);
        assert_int_equal(safetensors_read_raw(sa, ta, 0, ta->elements, ba), 0);
        assert_int_equal(safetensors_read_raw(sb, tb, 0, tb->elements, bb), 0);
        assert_memory_equal(ba, bb, ta->bytes);
        free(ba);
        free(bb);
    }
    safetensors_close(sa);
    safetensors_close(sb);
}

static void make_folder(const char *path)
{
    assert_int_equal(mkdir(path, 0755), 0);
}

static void copy_file(const char *from, const char *to, const char *name)
{
    char command[512];
    snprintf(command, sizeof command, "cp %s/%s %s/%s", from, name, to, name);
    assert_int_equal(system(command), 0);
}

static float value_of(uint32_t tensor, uint64_t i)
{
    return sinf((float)(i * 7 + tensor) * 0.37f) * 0.05f;
}

/* A source with the shapes of `model`: dtype of tensor t is dtypes[t % 3]; shards of shard_bytes.
 */
static const char *make_source(const char *name, const struct model_layout *layout,
                               const enum model_dtype dtypes[3], uint64_t shard_bytes)
{
    const char *folder = in_fixture(name);
    struct safetensors_writer *w;
    make_folder(folder);
    copy_file(UNTIED, folder, "config.json");
    assert_int_equal(safetensors_writer_open(&w, folder, shard_bytes), 0);
    for (uint32_t t = 0; t < layout->n_tensors; t++) {
        const struct model_tensor *m = &layout->tensors[t];
        const uint64_t shape[2] = {m->rows, m->cols};
        assert_int_equal(safetensors_writer_declare(w, m->name, dtypes[t % 3], m->dims, shape), 0);
    }
    assert_int_equal(safetensors_writer_start(w), 0);
    for (uint32_t t = 0; t < layout->n_tensors; t++)
        for (uint64_t i = 0; i < layout->tensors[t].elements; i++) {
            float v = value_of(t, i);
            assert_int_equal(safetensors_writer_write(w, &v, 1), 0);
        }
    assert_int_equal(safetensors_writer_finish(w), 0);
    safetensors_writer_close(w);
    return folder;
}

static void a_golden_model_comes_back_as_the_same_files(void **state)
{
    (void)state;
    const char *const folders[] = {GOLDEN, UNTIED, "tests/goldens/bf16_00"};
    const uint64_t page_elements[] = {4096, 8192, 65536};
    for (int f = 0; f < 3; f++)
        for (int k = 0; k < 6; k++) {
            struct model_layout layout;
            char name[32];
            load_layout(&layout, folders[f], page_elements[k / 2]);
            snprintf(name, sizeof name, "out/%d/%d", f, k);
            const char *out = in_fixture(name);
            struct import_config from = {.layout = &layout, .folder = folders[f]};
            struct export_config to = {.layout = &layout,
                                       .model_folder = folders[f],
                                       .weights_folder = folders[f],
                                       .out = out,
                                       .dtype = EXPORT_DTYPE_AUTO};
            copied(&from, &to, k % 2 ? BFLOAT16 : FLOAT32);
            same_file(folders[f], out, "model.safetensors");
            same_file(folders[f], out, "config.json");
            model_layout_destroy(&layout);
        }
}

static void sharded_sources_of_mixed_dtypes_keep_every_tensor(void **state)
{
    (void)state;
    const enum model_dtype mixed[][3] = {{DTYPE_BF16, DTYPE_BF16, DTYPE_BF16},
                                         {DTYPE_F16, DTYPE_F16, DTYPE_F16},
                                         {DTYPE_F32, DTYPE_BF16, DTYPE_F16}};
    struct model_layout layout;
    load_layout(&layout, UNTIED, 8192);
    for (int m = 0; m < 3; m++) {
        char name[16];
        snprintf(name, sizeof name, "source%d", m);
        const char *source = make_source(name, &layout, mixed[m], 20000);
        assert_int_equal(access(in_fixture(name), F_OK), 0);
        snprintf(name, sizeof name, "out%d", m);
        const char *out = in_fixture(name);
        struct import_config from = {.layout = &layout, .folder = source};
        struct export_config to = {.layout = &layout,
                                   .model_folder = source,
                                   .weights_folder = source,
                                   .out = out,
                                   .dtype = EXPORT_DTYPE_AUTO};
        copied(&from, &to, m % 2 ? FLOAT32 : BFLOAT16);
        same_tensors(source, out);
        same_file(source, out, "config.json");
    }
    model_layout_destroy(&layout);
}

/* The source's config.json says another dtype. */
static void set_config_dtype(const char *folder, enum model_dtype dtype)
{
    char *json, *changed;
    uint64_t n;
    assert_int_equal(model_folder_read(folder, "config.json", 1 << 20, &json, &n), 1);
    assert_int_equal(model_config_set_dtype(json, n, dtype, &changed, &n), 0);
    assert_int_equal(folder_write_file(folder, "config.json", changed, n), 0);
    free(changed);
    free(json);
}

static uint64_t file_bytes(const char *folder, const char *name)
{
    char path[256];
    struct stat status;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(stat(path, &status), 0);
    return (uint64_t)status.st_size;
}

/* config.json, each tensor and the size of the file say the same dtype. */
static void expect_dtype(const struct model_layout *layout, const char *folder,
                         enum model_dtype dtype)
{
    struct model_config config;
    struct safetensors *st;
    struct safetensors_tensor t;
    uint64_t data = 0;
    assert_int_equal(model_config_load(&config, folder), 0);
    assert_int_equal(config.source_dtype, dtype);
    assert_int_equal(safetensors_open_folder(&st, folder), 0);
    assert_int_equal(safetensors_n_tensors(st), layout->n_tensors);
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        const struct model_tensor *m = &layout->tensors[i];
        assert_int_equal(safetensors_find(st, m->name, &t), 0);
        assert_int_equal(t.dtype, dtype);
        assert_int_equal(t.n_dims, m->dims);
        assert_int_equal(t.shape[0], m->rows);
        assert_true(m->dims == 1 || t.shape[1] == m->cols);
        data += m->elements * model_dtype_bytes(dtype);
    }
    safetensors_close(st);
    uint64_t whole = file_bytes(folder, "model.safetensors");
    assert_true(whole > data && whole < data + 8192);
}

/* C30: what comes out has the dtype of what went in, or the one asked for, in tensors and config.
 * C31: and the shapes. */
static void config_tensors_and_size_agree_on_the_dtype(void **state)
{
    (void)state;
    static const enum model_dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    struct model_layout layout;
    load_layout(&layout, UNTIED, 8192);
    for (int from = 0; from < 3; from++) {
        char name[32];
        snprintf(name, sizeof name, "from%d", from);
        const enum model_dtype all[3] = {dtypes[from], dtypes[from], dtypes[from]};
        const char *source = make_source(name, &layout, all, UINT64_MAX / 2);
        set_config_dtype(source, dtypes[from]);
        layout.config.source_dtype = dtypes[from];
        struct import_config in = {.layout = &layout, .folder = source};
        for (int to = -1; to < 3; to++)
            for (int compute = FLOAT32; compute <= BFLOAT16; compute++) {
                snprintf(name, sizeof name, "out/%d/%d/%d", from, to, compute);
                const char *out = in_fixture(name);
                struct export_config e = {.layout = &layout,
                                          .model_folder = source,
                                          .weights_folder = source,
                                          .out = out,
                                          .dtype = to < 0 ? EXPORT_DTYPE_AUTO : (int)dtypes[to]};
                copied(&in, &e, (enum compute)compute);
                expect_dtype(&layout, out, dtypes[to < 0 ? from : to]);
                if (to < 0 || to == from)
                    same_file(source, out, "config.json");
            }
    }
    model_layout_destroy(&layout);
}

enum head { SAME_HEAD, OTHER_HEAD, OTHER_SHAPE };

/* GOLDEN, which is tied, with an lm_head.weight beside the embedding. */
static const char *make_with_head(const char *name, const struct model_layout *layout,
                                  enum head head)
{
    static float values[PAGE_MAX];
    const char *folder = in_fixture(name);
    struct safetensors *st;
    struct safetensors_writer *w;
    make_folder(folder);
    copy_file(GOLDEN, folder, "config.json");
    assert_int_equal(safetensors_open_folder(&st, GOLDEN), 0);
    assert_int_equal(safetensors_writer_open(&w, folder, UINT64_MAX / 2), 0);
    for (uint32_t t = 0; t <= layout->n_tensors; t++) { /* one more: the head */
        const struct model_tensor *m = &layout->tensors[t % layout->n_tensors];
        uint64_t shape[2] = {m->rows, m->cols};
        if (t == layout->n_tensors && head == OTHER_SHAPE)
            shape[0]--;
        const char *as = t == layout->n_tensors ? "lm_head.weight" : m->name;
        assert_int_equal(safetensors_writer_declare(w, as, DTYPE_F32, m->dims, shape), 0);
    }
    assert_int_equal(safetensors_writer_start(w), 0);
    for (uint32_t t = 0; t <= layout->n_tensors; t++) {
        struct safetensors_tensor found;
        const struct model_tensor *m = &layout->tensors[t % layout->n_tensors];
        assert_int_equal(safetensors_find(st, m->name, &found), 0);
        assert_true(found.elements <= PAGE_MAX);
        assert_int_equal(safetensors_read(st, &found, 0, found.elements, values), 0);
        uint64_t n = found.elements;
        if (t == layout->n_tensors && head == OTHER_SHAPE)
            n -= m->cols;
        if (t == layout->n_tensors && head == OTHER_HEAD)
            values[n - 1] += 0.5f;
        assert_int_equal(safetensors_writer_write(w, values, n), 0);
    }
    assert_int_equal(safetensors_writer_finish(w), 0);
    safetensors_writer_close(w);
    safetensors_close(st);
    return folder;
}

/* Tied, and a head in the file all the same: left out if it says nothing new, else refused, because
 * transformers would not tie the two. */
static void a_head_beside_tied_embeddings_must_equal_them(void **state)
{
    (void)state;
    struct model_layout layout;
    struct import *im;
    load_layout(&layout, GOLDEN, 65536);
    assert_true(layout.config.tie_word_embeddings && layout.tensors[0].role == MODEL_EMBED);
    const char *same = make_with_head("same", &layout, SAME_HEAD), *out = in_fixture("out");
    struct import_config from = {.layout = &layout, .folder = same};
    struct export_config to = {.layout = &layout,
                               .model_folder = same,
                               .weights_folder = same,
                               .out = out,
                               .dtype = EXPORT_DTYPE_AUTO};
    copied(&from, &to, FLOAT32);
    same_tensors(GOLDEN, out); /* without the head, as save_pretrained() */
    from.folder = make_with_head("other", &layout, OTHER_HEAD);
    assert_int_equal(import_open(&im, &from), -ERROR_USER);
    char element[64];
    snprintf(element, sizeof element, "tensor lm_head.weight: element %llu is ",
             (unsigned long long)layout.tensors[0].elements - 1);
    assert_non_null(strstr(error_text(), element));
    assert_non_null(strstr(error_text(), "tie_word_embeddings"));
    from.folder = make_with_head("shape", &layout, OTHER_SHAPE);
    assert_int_equal(import_open(&im, &from), -ERROR_USER);
    assert_non_null(strstr(error_text(), "tensor lm_head.weight: expected the shape of"));
    model_layout_destroy(&layout);
}

/* An export is made to be given away: nothing from elsewhere on this machine may be in it. */
static void a_tokenizer_that_is_a_link_out_of_the_folder_is_told_before_the_run(void **state)
{
    (void)state;
    struct model_layout layout;
    struct import *im;
    struct export *e;
    load_layout(&layout, GOLDEN, 65536);
    const char *source = in_fixture("source");
    make_folder(source);
    copy_file(GOLDEN, source, "config.json");
    copy_file(GOLDEN, source, "model.safetensors");
    fixture_text("secret", "{}");
    assert_int_equal(symlink("../secret", in_fixture("source/vocab.json")), 0);
    struct import_config from = {.layout = &layout, .folder = source};
    struct export_config to = {.layout = &layout,
                               .model_folder = source,
                               .weights_folder = source,
                               .out = in_fixture("out"),
                               .dtype = EXPORT_DTYPE_AUTO};
    assert_int_equal(import_open(&im, &from), -ERROR_USER);
    assert_non_null(strstr(error_text(), "vocab.json: expected a file of this folder"));
    assert_int_equal(export_open(&e, &to), -ERROR_USER);
    assert_non_null(strstr(error_text(), "vocab.json: expected a file of this folder"));
    assert_int_equal(access(in_fixture("out"), F_OK), -1);
    assert_int_equal(unlink(in_fixture("source/vocab.json")), 0);
    to.tokenizer = in_fixture("link"); /* named by hand: wherever it leads */
    assert_int_equal(symlink("secret", to.tokenizer), 0);
    copied(&from, &to, FLOAT32);
    assert_int_equal(access(in_fixture("out/tokenizer.json"), F_OK), 0);
    model_layout_destroy(&layout);
}

static void check_pages(uint64_t page_elements)
{
    struct model_layout layout;
    struct import *im;
    load_layout(&layout, UNTIED, page_elements);
    const enum model_dtype f32[3] = {DTYPE_F32, DTYPE_F32, DTYPE_F32};
    const char *source =
        make_source(page_elements == 4096 ? "small" : "large", &layout, f32, UINT64_MAX / 2);
    struct import_config from = {.layout = &layout, .folder = source};
    assert_int_equal(import_open(&im, &from), 0);
    static float master[PAGE_MAX];
    for (uint64_t p = layout.n_pages; p-- > 0;) { /* any order */
        const struct model_page *page = &layout.pages[p];
        struct model_part parts[MODEL_LAYER_TENSORS_MAX];
        static float expected[PAGE_MAX];
        memset(expected, 0, sizeof expected);
        uint32_t n = model_page_parts(&layout, page, parts);
        for (uint32_t i = 0; i < n; i++)
            for (uint64_t k = 0; k < parts[i].count; k++)
                expected[parts[i].page_start + k] =
                    value_of(parts[i].tensor, parts[i].tensor_start + k);
        memset(weights, 0xff, sizeof weights);
        assert_int_equal(import_page(im, page, weights, NULL), 0);
        assert_memory_equal(weights, expected, page->elements * sizeof(float));
        memset(weights, 0xff, sizeof weights);
        memset(residual, 0xff, sizeof residual);
        assert_int_equal(import_page(im, page, weights, residual), 0);
        join_master((uint16_t *)(void *)weights, residual, page->elements, master);
        assert_memory_equal(master, expected, page->elements * sizeof(float));
    }
    import_close(im);
    model_layout_destroy(&layout);
}

static void a_page_holds_its_tensors_and_zeros(void **state)
{
    (void)state;
    check_pages(4096);
    check_pages(65536);
}

static void random_weights_do_not_depend_on_pages_and_take_the_dtype_of_the_config(void **state)
{
    (void)state;
    const char *out[2];
    for (int k = 0; k < 2; k++) {
        struct model_layout layout;
        load_layout(&layout, GOLDEN, k ? 65536 : 4096);
        out[k] = in_fixture(k ? "b" : "a");
        struct import_config from = {.layout = &layout, .seed = 5};
        struct export_config to = {
            .layout = &layout, .model_folder = GOLDEN, .out = out[k], .dtype = EXPORT_DTYPE_AUTO};
        copied(&from, &to, k ? BFLOAT16 : FLOAT32);
        model_layout_destroy(&layout);
    }
    same_file(out[0], out[1], "model.safetensors");
    same_file(GOLDEN, out[0], "config.json");
}

static void another_dtype_rounds_and_says_so_in_the_config(void **state)
{
    (void)state;
    struct model_layout layout;
    struct model_config config;
    struct safetensors *a, *b;
    load_layout(&layout, GOLDEN, 65536);
    const char *out = in_fixture("half");
    struct import_config from = {.layout = &layout, .folder = GOLDEN};
    struct export_config to = {.layout = &layout,
                               .model_folder = GOLDEN,
                               .weights_folder = GOLDEN,
                               .out = out,
                               .dtype = DTYPE_BF16};
    copied(&from, &to, BFLOAT16);
    assert_int_equal(model_config_load(&config, out), 0);
    assert_int_equal(config.source_dtype, DTYPE_BF16);
    assert_int_equal(safetensors_open_folder(&a, GOLDEN), 0);
    assert_int_equal(safetensors_open_folder(&b, out), 0);
    for (uint64_t i = 0; i < safetensors_n_tensors(a); i++) {
        static float va[PAGE_MAX];
        static uint16_t rounded[PAGE_MAX], found[PAGE_MAX];
        const struct safetensors_tensor *t = safetensors_tensor_at(a, i);
        assert_true(t->elements <= PAGE_MAX);
        assert_int_equal(safetensors_read(a, t, 0, t->elements, va), 0);
        dtype_f32_to_bf16(va, t->elements, rounded);
        t = safetensors_tensor_at(b, i);
        assert_int_equal(t->dtype, DTYPE_BF16);
        assert_int_equal(safetensors_read_raw(b, t, 0, t->elements, found), 0);
        assert_memory_equal(rounded, found, t->elements * sizeof *found);
    }
    safetensors_close(a);
    safetensors_close(b);
    model_layout_destroy(&layout);
}

static void a_config_changes_its_dtype_and_no_other_byte(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{\"eps\": 1e-05, \"torch_dtype\" : \"float32\", \"x\": {\"dtype\": \"float32\"}}",
         "{\"eps\": 1e-05, \"torch_dtype\" : \"bfloat16\", \"x\": {\"dtype\": \"float32\"}}"},
        {"{\"dtype\":null,\"torch_dtype\":\"float16\"}",
         "{\"dtype\":\"bfloat16\",\"torch_dtype\":\"bfloat16\"}"},
        {"{\"a\": \"\\\"dtype\\\": \\\\\", \"b\": [\"dtype\", 1]}",
         "{\n  \"torch_dtype\": \"bfloat16\",\"a\": \"\\\"dtype\\\": \\\\\", \"b\": [\"dtype\", "
         "1]}"},
        {"{}", "{\n  \"torch_dtype\": \"bfloat16\"\n}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *out;
        size_t n;
        if (model_config_set_dtype(cases[i][0], strlen(cases[i][0]), DTYPE_BF16, &out, &n) < 0)
            fail_msg("%s", error_text());
        assert_int_equal(n, strlen(cases[i][1]));
        assert_memory_equal(out, cases[i][1], n);
        free(out);
    }
    char *out;
    size_t n;
    assert_int_equal(model_config_set_dtype("{\"dtype\": ", 10, DTYPE_F32, &out, &n), -ERROR_USER);
}

static void tokenizer_files_are_copied_and_others_are_not(void **state)
{
    (void)state;
    struct model_layout layout;
    load_layout(&layout, GOLDEN, 65536);
    const char *source = in_fixture("source"), *out = in_fixture("out");
    make_folder(source);
    copy_file(GOLDEN, source, "config.json");
    copy_file(GOLDEN, source, "model.safetensors");
    fixture_text("source/tokenizer.json", "{\"version\": \"1.0\"}");
    fixture_text("source/tokenizer_config.json", "{}");
    fixture_text("source/generation_config.json", "{\"eos_token_id\": 2}");
    fixture_text("source/chat_template.jinja", "{{ messages }}");
    fixture_text("source/notes.md", "private");
    struct import_config from = {.layout = &layout, .folder = source};
    struct export_config to = {.layout = &layout,
                               .model_folder = source,
                               .weights_folder = source,
                               .out = out,
                               .dtype = EXPORT_DTYPE_AUTO,
                               .step = 12};
    copied(&from, &to, FLOAT32);
    same_file(source, out, "tokenizer.json");
    same_file(source, out, "tokenizer_config.json");
    same_file(source, out, "generation_config.json");
    same_file(source, out, "chat_template.jinja");
    assert_int_equal(access(in_fixture("out/notes.md"), F_OK), -1);
    assert_int_equal(access(in_fixture("out/" EXPORT_MARKER), F_OK), 0);
    assert_int_equal(access(in_fixture("out.tmp"), F_OK), -1);
    model_layout_destroy(&layout);
}

static void an_unfinished_export_leaves_nothing_and_a_killed_one_is_done_again(void **state)
{
    (void)state;
    struct model_layout layout;
    load_layout(&layout, GOLDEN, 4096);
    const char *out = in_fixture("out");
    struct import_config from = {.layout = &layout, .folder = GOLDEN};
    struct export_config to = {.layout = &layout,
                               .model_folder = GOLDEN,
                               .weights_folder = GOLDEN,
                               .out = out,
                               .dtype = EXPORT_DTYPE_AUTO};
    assert_int_equal(copy_model(&from, &to, FLOAT32, 3), 0);
    assert_int_equal(access(out, F_OK), -1);
    assert_int_equal(access(in_fixture("out.tmp"), F_OK), -1);
    make_folder(in_fixture("out.tmp")); /* as a kill leaves it */
    fixture_text("out.tmp/" EXPORT_MARKER, "");
    fixture_text("out.tmp/model.safetensors", "half a file");
    fixture_text("out.tmp/model-00001-of-00002.safetensors", "of another number of shards");
    copied(&from, &to, FLOAT32);
    same_file(GOLDEN, out, "model.safetensors");
    assert_int_equal(access(in_fixture("out.tmp"), F_OK), -1);
    assert_int_equal(access(in_fixture("out/model-00001-of-00002.safetensors"), F_OK), -1);
    struct import_config fresh = {.layout = &layout, .seed = 3};
    copied(&fresh, &to, FLOAT32); /* over the earlier one */
    assert_int_equal(access(in_fixture("out.tmp"), F_OK), -1);
    char command[256];
    snprintf(command, sizeof command, "cmp -s " GOLDEN "/model.safetensors %s/model.safetensors",
             out);
    assert_int_not_equal(system(command), 0);
    model_layout_destroy(&layout);
}

static void a_folder_of_somebody_else_is_never_touched(void **state)
{
    (void)state;
    struct model_layout layout;
    load_layout(&layout, GOLDEN, 65536);
    make_folder(in_fixture("mine"));
    fixture_text("mine/model.safetensors", "precious");
    struct import_config from = {.layout = &layout, .folder = GOLDEN};
    struct export_config to = {.layout = &layout,
                               .model_folder = GOLDEN,
                               .weights_folder = GOLDEN,
                               .out = in_fixture("mine/"),
                               .dtype = EXPORT_DTYPE_AUTO};
    assert_int_equal(copy_model(&from, &to, FLOAT32, UINT64_MAX), -ERROR_USER);
    assert_non_null(strstr(error_text(), "mine: exists and is no earlier export"));
    assert_int_equal(access(in_fixture("mine/model.safetensors"), F_OK), 0);
    to.out = fixture_text("file", "a file");
    assert_int_equal(copy_model(&from, &to, FLOAT32, UINT64_MAX), -ERROR_USER);
    make_folder(in_fixture("empty"));
    to.out = in_fixture("empty");
    copied(&from, &to, FLOAT32);
    to.out = in_fixture("other");
    make_folder(in_fixture("other.tmp"));
    fixture_text("other.tmp/precious", "");
    assert_int_equal(copy_model(&from, &to, FLOAT32, UINT64_MAX), -ERROR_USER);
    assert_int_equal(access(in_fixture("other.tmp/precious"), F_OK), 0);
    model_layout_destroy(&layout);
}

static void weights_that_cannot_be_trained_or_exported_are_named(void **state)
{
    (void)state;
    struct model_layout layout;
    struct import *im;
    struct export *e;
    load_layout(&layout, UNTIED, 65536);
    const enum model_dtype f32[3] = {DTYPE_F32, DTYPE_F32, DTYPE_F32};
    const char *source = make_source("source", &layout, f32, UINT64_MAX / 2);
    const struct model_tensor *tensor = &layout.tensors[0];
    struct safetensors *st;
    struct safetensors_tensor t;
    assert_int_equal(safetensors_open_folder(&st, source), 0);
    assert_int_equal(safetensors_find(st, tensor->name, &t), 0);
    int fd = open(safetensors_file_path(st, t.file), O_WRONLY);
    safetensors_close(st);
    struct import_config from = {.layout = &layout, .folder = source};
    const float big = 70000.0f, bad = NAN;
    assert_int_equal(pwrite(fd, &big, 4, (off_t)t.offset + 4 * 77), 4);
    assert_int_equal(import_open(&im, &from), 0);
    assert_int_equal(import_page(im, &layout.pages[0], weights, NULL), 0);
    struct export_config to = {.layout = &layout,
                               .model_folder = source,
                               .weights_folder = source,
                               .out = in_fixture("out"),
                               .dtype = DTYPE_F16};
    assert_int_equal(export_open(&e, &to), 0);
    assert_int_equal(export_page(e, &layout.pages[0], weights, NULL), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "element 77 is 70000, float16 ends at 65504"));
    assert_non_null(strstr(error_text(), tensor->name));
    export_close(e);
    assert_non_null(strstr(error_text(), "element 77")); /* cleaning up keeps it */
    assert_int_equal(pwrite(fd, &bad, 4, (off_t)t.offset + 4 * 78), 4);
    close(fd);
    assert_int_equal(import_page(im, &layout.pages[0], weights, NULL), -ERROR_USER);
    assert_non_null(strstr(error_text(), "element 78 is not a number"));
    import_close(im);
    from.folder = GOLDEN; /* of another shape */
    assert_int_equal(import_open(&im, &from), -ERROR_USER);
    assert_non_null(strstr(error_text(), "expected shape"));
    model_layout_destroy(&layout);
}

static void make_export(const char *name, const char *marker)
{
    char file[128];
    make_folder(in_fixture(name));
    snprintf(file, sizeof file, "%s/model.safetensors", name);
    fixture_text(file, "weights");
    snprintf(file, sizeof file, "%s/%s", name, marker);
    fixture_text(file, "");
}

static int exists(const char *name)
{
    return access(in_fixture(name), F_OK) == 0;
}

static void rotation_deletes_the_oldest_of_ours_only(void **state)
{
    (void)state;
    make_export("step-2", EXPORT_MARKER);
    make_export("step-10", EXPORT_MARKER);
    make_export("step-9", EXPORT_MARKER);
    make_export("step-1", "README"); /* a folder of the user's */
    make_export("step-007", EXPORT_MARKER);
    make_export("best", EXPORT_MARKER);
    make_export("step-11.tmp", EXPORT_MARKER);
    fixture_text("step-9/notes.md", "the user's");
    assert_int_equal(export_rotate(fixture_directory, 0), 0); /* keeps all */
    assert_true(exists("step-2") && exists("step-9") && exists("step-10"));
    assert_false(exists("step-11.tmp"));
    assert_int_equal(export_rotate(fixture_directory, 2), 0);
    assert_false(exists("step-2"));
    assert_true(exists("step-9") && exists("step-10"));
    assert_int_equal(export_rotate(fixture_directory, 1), 0);
    assert_true(exists("step-9/notes.md")); /* what we did not write stays */
    assert_false(exists("step-9/model.safetensors"));
    assert_int_equal(export_rotate(fixture_directory, 1), 0);
    assert_true(exists("step-10") && exists("step-1/model.safetensors"));
    assert_true(exists("step-007/model.safetensors") && exists("best/model.safetensors"));
    assert_int_equal(export_rotate("/nonexistent/export", 1), 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_config_changes_its_dtype_and_no_other_byte),
        TEST(a_page_holds_its_tensors_and_zeros),
        TEST(a_golden_model_comes_back_as_the_same_files),
        TEST(sharded_sources_of_mixed_dtypes_keep_every_tensor),
        TEST(config_tensors_and_size_agree_on_the_dtype),
        TEST(a_head_beside_tied_embeddings_must_equal_them),
        TEST(a_tokenizer_that_is_a_link_out_of_the_folder_is_told_before_the_run),
        TEST(random_weights_do_not_depend_on_pages_and_take_the_dtype_of_the_config),
        TEST(another_dtype_rounds_and_says_so_in_the_config),
        TEST(tokenizer_files_are_copied_and_others_are_not),
        TEST(an_unfinished_export_leaves_nothing_and_a_killed_one_is_done_again),
        TEST(a_folder_of_somebody_else_is_never_touched),
        TEST(weights_that_cannot_be_trained_or_exported_are_named),
        TEST(rotation_deletes_the_oldest_of_ours_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
