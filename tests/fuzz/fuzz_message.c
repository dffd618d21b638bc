/* Control messages: what any process that finds the socket may send (ipc/message.h). */
#include "ipc/message.h"
#include "tests/fuzz/fuzz.h"

static void same(const struct message *a, const struct message *b)
{
    REQUIRE(a->type == b->type && a->generation == b->generation);
    REQUIRE(a->step == b->step && a->a == b->a);
    REQUIRE(strcmp(a->token, b->token) == 0 && strcmp(a->text, b->text) == 0);
}

/* The texts hold all that was sent: a NUL inside would hide the rest from every comparison. */
static size_t texts_bytes(const struct message *m)
{
    return strnlen(m->token, sizeof m->token) + strnlen(m->text, sizeof m->text);
}

/* Bytes of texts in an encoded message that was accepted: two str, four numbers, one array. */
static size_t sent_bytes(const uint8_t *data)
{
    size_t at = 1, sum = 0;
    for (int field = 0; field < 6; field++) {
        uint8_t head = data[at];
        if (head < 0x80) {
            at += 1;
        } else if (head >= 0xcc && head <= 0xcf) {
            at += 1 + ((size_t)1 << (head - 0xcc));
        } else {
            size_t n = head < 0xc0 ? head & 0x1fu : data[at + 1];
            size_t skip = head < 0xc0 ? 1 : 2;
            if (head == 0xda) {
                n = (size_t)data[at + 1] << 8 | data[at + 2];
                skip = 3;
            }
            at += skip + n;
            sum += n;
        }
    }
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct message m, again;
    static unsigned char out[MESSAGE_BYTES_MAX];
    memset(&m, 0xee, sizeof m);
    error_clear();
    int rc = message_decode(data, size, &m);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_FAILED);
        return 0;
    }
    REQUIRE(rc == 0 && size <= MESSAGE_BYTES_MAX && (unsigned)m.type < MESSAGE_COUNT);
    REQUIRE(strnlen(m.token, sizeof m.token) < sizeof m.token);
    REQUIRE(strnlen(m.text, sizeof m.text) < sizeof m.text);
    REQUIRE(texts_bytes(&m) == sent_bytes(data));
    int64_t n = message_encode(&m, out, sizeof out);
    REQUIRE(n > 0 && (size_t)n <= size); /* ours is the shortest form */
    REQUIRE(message_decode(out, (size_t)n, &again) == 0);
    same(&m, &again);
    REQUIRE(message_encode(&m, out, (size_t)n - 1) < 0);
    for (size_t cut = 0; cut < (size_t)n; cut += 1 + (size_t)n / 16)
        REQUIRE(message_decode(out, cut, &again) < 0);
    return 0;
}

static size_t put_text(uint8_t *out, char letter, size_t n)
{
    out[0] = 0xda;
    out[1] = (uint8_t)(n >> 8);
    out[2] = (uint8_t)n;
    memset(out + 3, letter, n);
    return 3 + n;
}

static size_t put_number(uint8_t *out, uint64_t x)
{
    out[0] = 0xcf;
    for (int i = 0; i < 8; i++)
        out[1 + i] = (uint8_t)(x >> (56 - 8 * i));
    return 9;
}

/* A message whose texts are about as long as they may be. */
static size_t make_message(uint8_t *out, uint64_t *random)
{
    size_t token = fuzz_below(random, 2) ? 32 : PLAN_TOKEN_BYTES - 2 + fuzz_below(random, 4);
    size_t text = fuzz_below(random, 2) ? fuzz_below(random, 40)
                                        : MESSAGE_TEXT_BYTES - 2 + fuzz_below(random, 4);
    size_t n = 0;
    out[n++] = 0x96;
    out[n++] = (uint8_t)fuzz_below(random, MESSAGE_COUNT + 1);
    n += put_text(out + n, 'a', token);
    n += put_number(out + n, fuzz_number(random) >> (fuzz_below(random, 4) ? 32 : 0));
    n += put_number(out + n, fuzz_number(random));
    n += put_number(out + n, fuzz_number(random));
    return n + put_text(out + n, 'b', text);
}

/* Now and then a whole message is made first, so that its fields are what is mutated. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    uint64_t random = seed;
    if (max_size >= MESSAGE_BYTES_MAX && fuzz_below(&random, 16) == 0) {
        size = make_message(data, &random);
        if (fuzz_below(&random, 4) == 0)
            return size;
    }
    return LLVMFuzzerMutate(data, size, max_size);
}
