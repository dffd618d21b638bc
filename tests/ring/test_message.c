/* Messages: what goes in comes out; everything else is refused whatever the bytes are. */
#include "ipc/message.h"

#include "tests/ring/ring_fixture.h"

#include <msgpack.h>
#include <stdlib.h>
#include <time.h>

static struct message example(enum message_type type)
{
    struct message m = {.type = type, .generation = 7, .step = 300, .a = UINT64_MAX};
    (void)snprintf(m.token, sizeof m.token, "%032x", 0xabcd);
    (void)snprintf(m.text, sizeof m.text, "gpu_worker.0");
    return m;
}

static int64_t encoded(const struct message *m, unsigned char out[MESSAGE_BYTES_MAX])
{
    int64_t n = message_encode(m, out, MESSAGE_BYTES_MAX);
    assert_true(n > 0);
    return n;
}

/* The bytes in a block of their own exact size, so that a sanitizer sees a read past the end. */
static int decode_exact(const unsigned char *bytes, size_t n, struct message *m)
{
    unsigned char *copy = malloc(n ? n : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, n);
    int rc = message_decode(copy, n, m);
    free(copy);
    return rc;
}

static void expect_equal(const struct message *a, const struct message *b)
{
    assert_int_equal(a->type, b->type);
    assert_int_equal(a->generation, b->generation);
    assert_true(a->step == b->step && a->a == b->a);
    assert_string_equal(a->token, b->token);
    assert_string_equal(a->text, b->text);
}

static void every_type_survives_the_round_trip(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    for (int type = 0; type < MESSAGE_COUNT; type++) {
        struct message m = example((enum message_type)type), back;
        memset(&back, 0xee, sizeof back);
        assert_int_equal(decode_exact(bytes, (size_t)encoded(&m, bytes), &back), 0);
        expect_equal(&m, &back);
    }
}

static void extreme_values_survive_the_round_trip(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    static const uint64_t values[] = {0, 127, 128, 255, 256, 65535, 65536, UINT32_MAX, UINT64_MAX};
    struct message m = example(MESSAGE_FAILED), back;
    memset(m.text, 'x', sizeof m.text - 1);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        m.step = m.a = values[i];
        m.generation = (uint32_t)values[i];
        assert_int_equal(decode_exact(bytes, (size_t)encoded(&m, bytes), &back), 0);
        expect_equal(&m, &back);
    }
    m = (struct message){.type = MESSAGE_HELLO};
    assert_int_equal(decode_exact(bytes, (size_t)encoded(&m, bytes), &back), 0);
    expect_equal(&m, &back);
}

static void a_buffer_too_small_is_an_error_at_every_size(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX + 1];
    struct message m = example(MESSAGE_WAKE);
    size_t n = (size_t)encoded(&m, bytes);
    for (size_t capacity = 0; capacity < n; capacity++) {
        bytes[capacity] = 0xee;
        assert_int_equal(message_encode(&m, bytes, capacity), -ERROR_FAILED);
        assert_int_equal(bytes[capacity], 0xee);
    }
    fixture_expect_text("message WAKE does not fit into");
    assert_int_equal(message_encode(&m, bytes, n), n);
}

static void a_text_without_an_end_is_cut_at_its_field(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message m = example(MESSAGE_FAILED), back;
    memset(m.text, 'y', sizeof m.text);
    memset(m.token, 'z', sizeof m.token);
    assert_int_equal(decode_exact(bytes, (size_t)encoded(&m, bytes), &back), 0);
    assert_int_equal(strlen(back.text), MESSAGE_TEXT_BYTES - 1);
    assert_int_equal(strlen(back.token), PLAN_TOKEN_BYTES - 1);
}

static void a_message_cut_at_any_byte_is_refused(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message m = example(MESSAGE_DOORBELL), back;
    size_t n = (size_t)encoded(&m, bytes);
    for (size_t cut = 0; cut < n; cut++)
        assert_int_equal(decode_exact(bytes, cut, &back), -ERROR_FAILED);
    fixture_expect_text("is not one of ours");
}

static void a_message_with_a_byte_behind_it_is_refused(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message m = example(MESSAGE_DOORBELL), back;
    size_t n = (size_t)encoded(&m, bytes);
    bytes[n] = 0;
    assert_int_equal(decode_exact(bytes, n + 1, &back), -ERROR_FAILED);
}

static void an_oversized_message_is_refused(void **state)
{
    (void)state;
    static unsigned char bytes[2 * MESSAGE_BYTES_MAX];
    struct message m = example(MESSAGE_WAKE), back;
    (void)encoded(&m, bytes);
    assert_int_equal(decode_exact(bytes, MESSAGE_BYTES_MAX + 1, &back), -ERROR_FAILED);
    fixture_expect_text("message of 8193 bytes, at most 8192 expected");
}

/* -- fields of a wrong type -- */

enum odd {
    ODD_NONE,
    ODD_NIL,
    ODD_TRUE,
    ODD_NEGATIVE,
    ODD_FLOAT,
    ODD_BIN,
    ODD_ARRAY,
    ODD_MAP,
    ODD_EXT,
    ODD_LONG_TEXT,
    ODD_NUMBER,
    ODD_TEXT,
    ODD_HUGE,
    ODD_COUNT
};

static void pack_odd(msgpack_packer *p, enum odd odd)
{
    static const char text[MESSAGE_TEXT_BYTES];
    switch (odd) {
    case ODD_NIL:
        (void)msgpack_pack_nil(p);
        break;
    case ODD_TRUE:
        (void)msgpack_pack_true(p);
        break;
    case ODD_NEGATIVE:
        (void)msgpack_pack_int(p, -1);
        break;
    case ODD_FLOAT:
        (void)msgpack_pack_double(p, 1.0);
        break;
    case ODD_BIN:
        (void)msgpack_pack_bin(p, 1), (void)msgpack_pack_bin_body(p, "a", 1);
        break;
    case ODD_ARRAY:
        (void)msgpack_pack_array(p, 1), (void)msgpack_pack_nil(p);
        break;
    case ODD_MAP:
        (void)msgpack_pack_map(p, 0);
        break;
    case ODD_EXT:
        (void)msgpack_pack_ext(p, 1, 1), (void)msgpack_pack_ext_body(p, "a", 1);
        break;
    case ODD_LONG_TEXT:
        (void)msgpack_pack_str(p, sizeof text), (void)msgpack_pack_str_body(p, text, sizeof text);
        break;
    case ODD_NUMBER:
        (void)msgpack_pack_uint8(p, 1);
        break;
    case ODD_TEXT:
        (void)msgpack_pack_str(p, 1), (void)msgpack_pack_str_body(p, "a", 1);
        break;
    case ODD_HUGE:
        (void)msgpack_pack_uint64(p, UINT64_MAX);
        break;
    case ODD_NONE:
    case ODD_COUNT:
        break;
    }
}

/* Decodes a message of `fields` fields that is right but for field `place`. */
static int decode_odd(size_t fields, size_t place, enum odd odd)
{
    msgpack_sbuffer buffer;
    msgpack_packer p;
    struct message m;
    msgpack_sbuffer_init(&buffer);
    msgpack_packer_init(&p, &buffer, msgpack_sbuffer_write);
    (void)msgpack_pack_array(&p, fields);
    for (size_t i = 0; i < fields; i++)
        pack_odd(&p, i == place ? odd : i == 1 || i == 5 ? ODD_TEXT : ODD_NUMBER);
    int rc = decode_exact((const unsigned char *)buffer.data, buffer.size, &m);
    msgpack_sbuffer_destroy(&buffer);
    return rc;
}

static void a_field_of_a_wrong_type_is_refused(void **state)
{
    (void)state;
    assert_int_equal(decode_odd(6, 99, ODD_NONE), 0);
    for (size_t place = 0; place < 6; place++) {
        int is_text = place == 1 || place == 5;
        for (int odd = ODD_NIL; odd < ODD_COUNT; odd++) {
            int fine = odd == (is_text ? ODD_TEXT : ODD_NUMBER) ||
                       (odd == ODD_HUGE && (place == 3 || place == 4)); /* 64 bits wide */
            assert_int_equal(decode_odd(6, place, (enum odd)odd), fine ? 0 : -ERROR_FAILED);
        }
    }
}

static void a_wrong_number_of_fields_is_refused(void **state)
{
    (void)state;
    for (size_t fields = 0; fields < 20; fields++)
        assert_int_equal(decode_odd(fields, 99, ODD_NONE), fields == 6 ? 0 : -ERROR_FAILED);
}

static void an_unknown_type_is_refused(void **state)
{
    (void)state;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message m = example((enum message_type)MESSAGE_COUNT), back;
    assert_int_equal(decode_exact(bytes, (size_t)encoded(&m, bytes), &back), -ERROR_FAILED);
    assert_string_equal(message_name((enum message_type)MESSAGE_COUNT), "?");
}

static void headers_that_promise_more_than_there_is_cost_nothing(void **state)
{
    (void)state;
    static const unsigned char headers[][5] = {
        {0xdd, 0xff, 0xff, 0xff, 0xff}, /* array of 2^32 - 1 */
        {0xdf, 0xff, 0xff, 0xff, 0xff}, /* map */
        {0xdb, 0xff, 0xff, 0xff, 0xff}, /* text */
        {0xc6, 0xff, 0xff, 0xff, 0xff}, /* binary */
        {0xc9, 0xff, 0xff, 0xff, 0xff}, /* extension */
    };
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message m;
    clock_t start = clock();
    for (size_t h = 0; h < sizeof headers / sizeof *headers; h++)
        for (size_t first = 0; first < 2; first++) { /* alone, or as the first field of ours */
            bytes[0] = 0x96;
            for (size_t at = first; at + 5 <= sizeof bytes; at += 5)
                memcpy(bytes + at, headers[h], 5);
            for (size_t n = 1; n < 200; n++)
                assert_int_equal(decode_exact(bytes, n, &m), -ERROR_FAILED);
            assert_int_equal(decode_exact(bytes, sizeof bytes, &m), -ERROR_FAILED);
        }
    memset(bytes, 0x91, sizeof bytes); /* arrays in arrays in arrays */
    assert_int_equal(decode_exact(bytes, sizeof bytes, &m), -ERROR_FAILED);
    assert_true(clock() - start < 2 * CLOCKS_PER_SEC);
}

/* -- fuzz -- */

/* What decodes must be well formed and mean the same when it is sent on. */
static void expect_sane(const struct message *m)
{
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message back;
    assert_true((unsigned)m->type < MESSAGE_COUNT);
    assert_non_null(memchr(m->text, 0, sizeof m->text));
    assert_non_null(memchr(m->token, 0, sizeof m->token));
    assert_int_equal(decode_exact(bytes, (size_t)encoded(m, bytes), &back), 0);
    expect_equal(m, &back);
}

static void random_bytes_are_decoded_or_refused_but_never_harm(void **state)
{
    (void)state;
    uint64_t seed = (uint64_t)time(NULL);
    unsigned char bytes[256];
    struct message m;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 20000; i++) {
        size_t n = fixture_random(&seed) % sizeof bytes;
        for (size_t k = 0; k < n; k++)
            bytes[k] = (unsigned char)fixture_random(&seed);
        if (n && i % 2)
            bytes[0] = 0x96; /* past the first gate */
        if (decode_exact(bytes, n, &m) == 0)
            expect_sane(&m);
    }
}

static void changed_messages_are_decoded_or_refused_but_never_harm(void **state)
{
    (void)state;
    uint64_t seed = (uint64_t)time(NULL), accepted = 0;
    unsigned char bytes[MESSAGE_BYTES_MAX];
    struct message m, back;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 20000; i++) {
        m = example((enum message_type)(fixture_random(&seed) % MESSAGE_COUNT));
        size_t n = (size_t)encoded(&m, bytes);
        for (uint64_t changes = 1 + fixture_random(&seed) % 3; changes; changes--)
            bytes[fixture_random(&seed) % n] ^= (unsigned char)(1 << fixture_random(&seed) % 8);
        if (decode_exact(bytes, n, &back) < 0)
            continue;
        accepted++;
        expect_sane(&back);
    }
    assert_true(accepted > 100); /* else the test would prove nothing */
}

static void only_the_listed_senders_may_send(void **state)
{
    (void)state;
    static const char roles[] = "wlc";
    static const char *const allowed[MESSAGE_COUNT] = {
        [MESSAGE_HELLO] = "wl",  [MESSAGE_READY] = "wl",    [MESSAGE_FACT] = "wl",
        [MESSAGE_FAILED] = "wl", [MESSAGE_DOORBELL] = "wl", [MESSAGE_WAKE] = "lw",
        [MESSAGE_STOP] = "cl",   [MESSAGE_STOPPING] = "lc"};
    for (int type = 0; type < MESSAGE_COUNT; type++)
        for (int s = 0; s < 3; s++)
            for (int r = 0; r < 3; r++)
                assert_int_equal(message_allowed((enum message_type)type, roles[s], roles[r]),
                                 allowed[type][0] == roles[s] && allowed[type][1] == roles[r]);
    assert_false(message_allowed((enum message_type)MESSAGE_COUNT, 'w', 'l'));
    assert_string_equal(message_name(MESSAGE_STOPPING), "STOPPING");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_survives_the_round_trip),
        cmocka_unit_test(extreme_values_survive_the_round_trip),
        cmocka_unit_test(a_buffer_too_small_is_an_error_at_every_size),
        cmocka_unit_test(a_text_without_an_end_is_cut_at_its_field),
        cmocka_unit_test(a_message_cut_at_any_byte_is_refused),
        cmocka_unit_test(a_message_with_a_byte_behind_it_is_refused),
        cmocka_unit_test(an_oversized_message_is_refused),
        cmocka_unit_test(a_field_of_a_wrong_type_is_refused),
        cmocka_unit_test(a_wrong_number_of_fields_is_refused),
        cmocka_unit_test(an_unknown_type_is_refused),
        cmocka_unit_test(headers_that_promise_more_than_there_is_cost_nothing),
        cmocka_unit_test(only_the_listed_senders_may_send),
        cmocka_unit_test(random_bytes_are_decoded_or_refused_but_never_harm),
        cmocka_unit_test(changed_messages_are_decoded_or_refused_but_never_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
