#include "ipc/message.h"

#include <msgpack.h>
#include <string.h>

#include "procs/error.h"

enum { MESSAGE_FIELDS = 6 };

static const struct {
    const char *name, *who;
} rows[MESSAGE_COUNT] = {
#define X(name, who, text) {#name, who},
    MESSAGE_LIST(X)
#undef X
};

const char *message_name(enum message_type type)
{
    return (unsigned)type < MESSAGE_COUNT ? rows[type].name : "?";
}

int message_allowed(enum message_type type, char sender, char receiver)
{
    return (unsigned)type < MESSAGE_COUNT && rows[type].who[0] == sender &&
           rows[type].who[1] == receiver;
}

struct buffer {
    unsigned char *out;
    size_t used, capacity;
};

static int buffer_write(void *data, const char *bytes, size_t n)
{
    struct buffer *b = data;
    if (b->used + n > b->capacity)
        return -1;
    memcpy(b->out + b->used, bytes, n);
    b->used += n;
    return 0;
}

static int pack_text(msgpack_packer *p, const char *text, size_t capacity)
{
    size_t n = strnlen(text, capacity - 1);
    return msgpack_pack_str(p, n) < 0 || msgpack_pack_str_body(p, text, n) < 0 ? -1 : 0;
}

int64_t message_encode(const struct message *m, unsigned char *out, size_t capacity)
{
    struct buffer b = {out, 0, capacity};
    msgpack_packer p;
    msgpack_packer_init(&p, &b, buffer_write);
    if (msgpack_pack_array(&p, MESSAGE_FIELDS) < 0 ||
        msgpack_pack_uint32(&p, (uint32_t)m->type) < 0 ||
        pack_text(&p, m->token, sizeof m->token) < 0 ||
        msgpack_pack_uint32(&p, m->generation) < 0 || msgpack_pack_uint64(&p, m->step) < 0 ||
        msgpack_pack_uint64(&p, m->a) < 0 || pack_text(&p, m->text, sizeof m->text) < 0)
        return error_set(ERROR_FAILED, "message %s does not fit into %zu bytes",
                         message_name(m->type), capacity);
    return (int64_t)b.used;
}

static int get_number(const msgpack_object *o, uint64_t max, uint64_t *out)
{
    if (o->type != MSGPACK_OBJECT_POSITIVE_INTEGER || o->via.u64 > max)
        return -1;
    *out = o->via.u64;
    return 0;
}

static int get_text(const msgpack_object *o, char *out, size_t capacity)
{
    if (o->type != MSGPACK_OBJECT_STR || o->via.str.size >= capacity)
        return -1;
    if (o->via.str.size > 0) { /* msgpack-c gives an empty text a null pointer */
        if (memchr(o->via.str.ptr, '\0', o->via.str.size)) /* would hide what follows */
            return -1;
        memcpy(out, o->via.str.ptr, o->via.str.size);
    }
    out[o->via.str.size] = '\0';
    return 0;
}

static int get_fields(const msgpack_object *o, struct message *m)
{
    uint64_t type = 0, generation = 0;
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size != MESSAGE_FIELDS)
        return -1;
    const msgpack_object *f = o->via.array.ptr;
    if (get_number(&f[0], MESSAGE_COUNT - 1, &type) < 0 ||
        get_text(&f[1], m->token, sizeof m->token) < 0 ||
        get_number(&f[2], UINT32_MAX, &generation) < 0 ||
        get_number(&f[3], UINT64_MAX, &m->step) < 0 || get_number(&f[4], UINT64_MAX, &m->a) < 0 ||
        get_text(&f[5], m->text, sizeof m->text) < 0)
        return -1;
    m->type = (enum message_type)type;
    m->generation = (uint32_t)generation;
    return 0;
}

/* Bytes of the number or text that begins here, at most n; 0 for anything else. */
static size_t field_bytes(const unsigned char *bytes, size_t n)
{
    uint64_t size = 0;
    if (n == 0)
        return 0;
    unsigned char head = bytes[0];
    if (head < 0x80) /* positive fixint */
        size = 1;
    else if (head >= 0xa0 && head < 0xc0) /* fixstr */
        size = 1u + (head & 0x1f);
    else if (head >= 0xcc && head <= 0xcf) /* uint 8, 16, 32, 64 */
        size = 1u + (1u << (head - 0xcc));
    else if (head == 0xd9 && n >= 2) /* str 8 */
        size = 2u + bytes[1];
    else if (head == 0xda && n >= 3) /* str 16 */
        size = 3u + ((uint32_t)bytes[1] << 8 | bytes[2]);
    return size <= n ? (size_t)size : 0;
}

/* msgpack-c allocates what a header promises (five bytes can ask for 128 GB) before it looks for
 * the elements: so nothing but an array of six plain fields comes that far. */
static int has_our_shape(const unsigned char *bytes, size_t n)
{
    size_t at = 1;
    if (n == 0 || bytes[0] != (0x90 | MESSAGE_FIELDS))
        return 0;
    for (int i = 0; i < MESSAGE_FIELDS; i++) {
        size_t size = field_bytes(bytes + at, n - at);
        if (size == 0)
            return 0;
        at += size;
    }
    return at == n;
}

int message_decode(const unsigned char *bytes, size_t n, struct message *m)
{
    if (n > MESSAGE_BYTES_MAX)
        return error_set(ERROR_FAILED, "message of %zu bytes, at most %d expected", n,
                         MESSAGE_BYTES_MAX);
    if (!has_our_shape(bytes, n))
        return error_set(ERROR_FAILED, "message of %zu bytes is not one of ours", n);
    msgpack_unpacked unpacked;
    msgpack_unpacked_init(&unpacked);
    size_t offset = 0;
    msgpack_unpack_return rc = msgpack_unpack_next(&unpacked, (const char *)bytes, n, &offset);
    int ok = rc == MSGPACK_UNPACK_SUCCESS && offset == n && get_fields(&unpacked.data, m) == 0;
    msgpack_unpacked_destroy(&unpacked);
    return ok ? 0 : error_set(ERROR_FAILED, "message of %zu bytes is not one of ours", n);
}
