/* Files of a model's folder: which links are followed, what is never waited for, what is bounded.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/config.h"
#include "model/folder_file.h"
#include "model/json.h"
#include "model/safetensors.h"
#include "procs/error.h"

static char base[64];

static int make_base(void **state)
{
    (void)state;
    (void)snprintf(base, sizeof base, "/tmp/model_folder_XXXXXX");
    error_clear();
    (void)alarm(60); /* waiting is what must not happen */
    return mkdtemp(base) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *ftw)
{
    (void)status, (void)type, (void)ftw;
    return remove(path);
}

static int remove_base(void **state)
{
    (void)state;
    return nftw(base, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static const char *in_base(const char *name)
{
    static char paths[8][256];
    static unsigned next;
    char *path = paths[next++ % 8];
    (void)snprintf(path, sizeof paths[0], "%s/%s", base, name);
    return path;
}

static void folder_at(const char *name)
{
    assert_int_equal(mkdir(in_base(name), 0755), 0);
}

static void link_at(const char *name, const char *target)
{
    assert_int_equal(symlink(target, in_base(name)), 0);
}

static void file_at(const char *name, const void *bytes, size_t n)
{
    FILE *f = fopen(in_base(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void text_at(const char *name, const char *text)
{
    file_at(name, text, strlen(text));
}

/* A header and no data. */
static void header_at(const char *name, const char *text, uint64_t n)
{
    FILE *f = fopen(in_base(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(&n, sizeof n, 1, f), 1);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void expect_text(const char *folder, const char *name, const char *expected)
{
    char found[16] = "";
    int fd = -1;
    if (model_folder_open(in_base(folder), name, &fd) != 1)
        fail_msg("%s/%s: %s", folder, name, error_text());
    assert_true(read(fd, found, sizeof found - 1) >= 0);
    assert_string_equal(found, expected);
    assert_int_equal(close(fd), 0);
}

static void expect_refused(const char *folder, const char *name, const char *words)
{
    int fd = -1;
    int rc = model_folder_open(in_base(folder), name, &fd);
    if (rc != -ERROR_USER || !strstr(error_text(), words))
        fail_msg("%s/%s: expected a refusal with \"%s\", got %d: %s", folder, name, words, rc,
                 rc < 0 ? error_text() : "");
    assert_int_equal(fd, -1);
}

static void links_that_stay_in_the_folder_are_followed(void **state)
{
    (void)state;
    int fd;
    folder_at("m");
    folder_at("m/sub");
    text_at("m/a", "a");
    text_at("m/sub/b", "b");
    link_at("m/here", "a");
    link_at("m/below", "sub/b");
    link_at("m/absolute", in_base("m/a"));
    link_at("m/round", "../m/sub/../a");
    link_at("m/chain", "round");
    link_at("n", "m"); /* the folder itself may be a link */
    expect_text("m", "a", "a");
    expect_text("m", "here", "a");
    expect_text("m", "below", "b");
    expect_text("m", "absolute", "a");
    expect_text("m", "chain", "a");
    expect_text("n", "chain", "a");
    assert_int_equal(model_folder_open(in_base("m"), "absent", &fd), 0);
    assert_int_equal(model_folder_open(in_base("absent"), "a", &fd), 0);
}

static void links_out_of_the_folder_are_refused(void **state)
{
    (void)state;
    folder_at("m");
    folder_at("mm"); /* the same beginning */
    text_at("mm/a", "a");
    text_at("secret", "s");
    link_at("m/up", "../secret");
    link_at("m/absolute", "/etc/passwd");
    link_at("m/neighbour", "../mm/a");
    link_at("m/door", "..");
    link_at("m/through", "door/secret");
    link_at("m/nothing", "absent");
    link_at("m/loop", "loop");
    expect_refused("m", "up", "expected a file of this folder, found a link to /");
    assert_non_null(strstr(error_text(), "hint:"));
    expect_refused("m", "absolute", "found a link to /etc/passwd");
    expect_refused("m", "neighbour", "found a link to");
    expect_refused("m", "through", "found a link to");
    expect_refused("m", "nothing", "found a link to nothing");
    expect_refused("m", "loop", "cannot open");
    expect_refused("mm/a", "b", "cannot open"); /* a file where the folder should be */
}

static void the_hub_s_cache_leads_into_its_own_blobs_alone(void **state)
{
    (void)state;
    folder_at("models--org--x");
    folder_at("models--org--x/blobs");
    folder_at("models--org--x/snapshots");
    folder_at("models--org--x/snapshots/4f2a");
    folder_at("models--org--y");
    folder_at("models--org--y/blobs");
    text_at("models--org--x/blobs/0c1d", "x");
    text_at("models--org--y/blobs/0c1d", "y");
    text_at("models--org--x/token", "t");
    link_at("models--org--x/snapshots/4f2a/a", "../../blobs/0c1d");
    link_at("models--org--x/snapshots/4f2a/b", "../../../models--org--y/blobs/0c1d");
    link_at("models--org--x/snapshots/4f2a/c", "../../token");
    link_at("x", "models--org--x/snapshots/4f2a");
    expect_text("models--org--x/snapshots/4f2a", "a", "x");
    expect_text("x", "a", "x");
    expect_text("models--org--x/snapshots/4f2a/.", "a", "x");
    expect_refused("x", "b", "found a link to");
    expect_refused("x", "c", "found a link to");
    folder_at("models--org--x/blobs/sub"); /* not beside snapshots/ */
    link_at("models--org--x/blobs/sub/a", "../0c1d");
    expect_refused("models--org--x/blobs/sub", "a", "found a link to");
}

static void weights_index_and_config_may_not_lead_out(void **state)
{
    (void)state;
    struct safetensors *st;
    struct model_config config;
    folder_at("m");
    header_at("out.safetensors", "{}", 2);
    text_at("out.json", "{\"weight_map\":{\"a\":\"a.safetensors\"}}");
    link_at("m/config.json", "../out.json");
    assert_int_equal(model_config_load(&config, in_base("m")), -ERROR_USER);
    assert_non_null(strstr(error_text(), "found a link to"));
    link_at("m/model.safetensors", "../out.safetensors");
    assert_int_equal(safetensors_open_folder(&st, in_base("m")), -ERROR_USER);
    assert_non_null(strstr(error_text(), "m/model.safetensors: expected a file of this folder"));
    assert_int_equal(unlink(in_base("m/model.safetensors")), 0);
    link_at("m/model.safetensors.index.json", "../out.json");
    assert_int_equal(safetensors_open_folder(&st, in_base("m")), -ERROR_USER);
    assert_non_null(strstr(error_text(), "index.json: expected a file of this folder"));
    assert_int_equal(unlink(in_base("m/model.safetensors.index.json")), 0);
    text_at("m/model.safetensors.index.json", "{\"weight_map\":{\"a\":\"a.safetensors\"}}");
    link_at("m/a.safetensors", "../out.safetensors");
    assert_int_equal(safetensors_open_folder(&st, in_base("m")), -ERROR_USER);
    assert_non_null(strstr(error_text(), "m/a.safetensors: expected a file of this folder"));
    assert_int_equal(safetensors_open_file(&st, in_base("m/a.safetensors")), 0); /* named by hand */
    safetensors_close(st);
}

/* Opening a FIFO without a writer waits for ever, unless one asks not to. */
static void nobody_waits_for_a_fifo_or_reads_a_folder(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors",
                                        "model.safetensors.index.json"};
    for (int k = 0; k < 6; k++) {
        struct safetensors *st;
        struct model_config config;
        char name[64];
        folder_at("m");
        (void)snprintf(name, sizeof name, "m/%s", names[k % 3]);
        assert_int_equal(k < 3 ? mkfifo(in_base(name), 0600) : mkdir(in_base(name), 0700), 0);
        int rc = k % 3 ? safetensors_open_folder(&st, in_base("m"))
                       : model_config_load(&config, in_base("m"));
        assert_int_equal(rc, -ERROR_USER);
        assert_non_null(strstr(error_text(), "expected a regular file"));
        assert_non_null(strstr(error_text(), names[k % 3]));
        assert_int_equal(remove(in_base(name)), 0);
        assert_int_equal(rmdir(in_base("m")), 0);
    }
    assert_int_equal(mkfifo(in_base("f"), 0600), 0);
    struct safetensors *st;
    json_t *root;
    assert_int_equal(safetensors_open_file(&st, in_base("f")), -ERROR_USER);
    assert_int_equal(model_json_load(&root, in_base("f"), 100), -ERROR_USER);
}

static char *repeated(const char *start, const char *piece, size_t times, const char *end,
                      size_t *n)
{
    size_t m = strlen(piece), s = strlen(start), e = strlen(end);
    char *text = malloc(s + times * m + e + 1);
    assert_non_null(text);
    memcpy(text, start, s);
    for (size_t i = 0; i < times; i++)
        memcpy(text + s + i * m, piece, m);
    memcpy(text + s + times * m, end, e + 1);
    *n = s + times * m + e;
    return text;
}

/* A hundred megabytes of [[],[],...] would become ten gigabytes of values. */
static void a_text_of_too_many_values_is_refused_before_it_is_parsed(void **state)
{
    (void)state;
    json_t *root;
    size_t n;
    char *text = repeated("{\"a\":[", "[],", MODEL_JSON_VALUES_MAX / 2, "[]]}", &n);
    assert_int_equal(model_json_parse(&root, text, n, "x"), -ERROR_USER);
    assert_non_null(strstr(error_text(), "x: expected at most 4194304 values, found up to 4194"));
    assert_null(root);
    folder_at("m");
    header_at("m/model.safetensors", text, n);
    struct safetensors *st;
    assert_int_equal(safetensors_open_folder(&st, in_base("m")), -ERROR_USER);
    assert_non_null(strstr(error_text(), "values"));
    free(text);
    /* in a string they are text, whatever is escaped */
    text = repeated("{\"a\\\\\":\"\\\"", "[,{", MODEL_JSON_VALUES_MAX / 2, "\"}", &n);
    assert_int_equal(model_json_parse(&root, text, n, "x"), 0);
    json_decref(root);
    free(text);
}

static void a_zero_byte_is_no_json(void **state)
{
    (void)state;
    static const char text[] = "{\"a\":1\0}";
    json_t *root;
    assert_int_equal(model_json_parse(&root, text, sizeof text - 1, "x"), -ERROR_USER);
    assert_non_null(strstr(error_text(), "x:1:7: not valid JSON: a zero byte"));
    assert_int_equal(model_json_parse(&root, text, 0, "x"), -ERROR_USER);
}

static void a_model_of_too_many_tensors_is_refused(void **state)
{
    (void)state;
    enum { BYTES = 60 };
    struct safetensors *st;
    char *text = malloc((size_t)(SAFETENSORS_TENSORS_MAX + 1) * BYTES);
    assert_non_null(text);
    size_t n = 0;
    for (int i = 0; i <= SAFETENSORS_TENSORS_MAX; i++)
        n += (size_t)snprintf(text + n, BYTES,
                              "%c\"%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                              i ? ',' : '{', i);
    text[n++] = '}';
    header_at("many.safetensors", text, n);
    assert_int_equal(safetensors_open_file(&st, in_base("many.safetensors")), -ERROR_USER);
    assert_non_null(
        strstr(error_text(), "expected at most 262144 tensors in a model, found 262145"));
    free(text);
}

/* A hundred names for one file: told at the second, not after a hundred headers. */
static void a_shard_is_compared_with_the_index_before_the_next_is_opened(void **state)
{
    (void)state;
    static const char tensor[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}";
    struct safetensors *st;
    folder_at("m");
    header_at("m/1.safetensors", tensor, sizeof tensor - 1);
    link_at("m/2.safetensors", "1.safetensors");
    text_at("m/3.safetensors", "broken");
    text_at("m/model.safetensors.index.json",
            "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\","
            "\"c\":\"3.safetensors\"}}");
    assert_int_equal(safetensors_open_folder(&st, in_base("m")), -ERROR_USER);
    assert_non_null(
        strstr(error_text(), "tensor a: expected in 1.safetensors, found in 2.safetensors"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_base, remove_base)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(links_that_stay_in_the_folder_are_followed),
        TEST(links_out_of_the_folder_are_refused),
        TEST(the_hub_s_cache_leads_into_its_own_blobs_alone),
        TEST(weights_index_and_config_may_not_lead_out),
        TEST(nobody_waits_for_a_fifo_or_reads_a_folder),
        TEST(a_text_of_too_many_values_is_refused_before_it_is_parsed),
        TEST(a_zero_byte_is_no_json),
        TEST(a_model_of_too_many_tensors_is_refused),
        TEST(a_shard_is_compared_with_the_index_before_the_next_is_opened),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
