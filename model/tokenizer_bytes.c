#include "model/tokenizer_bytes.h"

void tokenizer_bytes_encode(const void *bytes, size_t n, uint16_t *tokens)
{
    const uint8_t *b = bytes;
    for (size_t i = 0; i < n; i++)
        tokens[i] = b[i];
}

size_t tokenizer_bytes_decode(int32_t id, char *text)
{
    if (id >= TOKENIZER_BYTES_END)
        return 0;
    *text = (char)(uint8_t)id;
    return 1;
}

/*
 * The first byte says how many follow and which range the second may have (RFC 3629, section 4);
 * the narrow ranges are what excludes overlong forms, surrogates and numbers beyond U+10FFFF.
 */
static int utf8_begin(struct utf8_check *u, uint8_t b)
{
    u->low = 0x80;
    u->high = 0xbf;
    if (b < 0x80)
        return 0;
    if (b < 0xc2 || b > 0xf4)
        return -1;
    u->pending = b < 0xe0 ? 1 : b < 0xf0 ? 2 : 3;
    if (b == 0xe0)
        u->low = 0xa0;
    else if (b == 0xed)
        u->high = 0x9f;
    else if (b == 0xf0)
        u->low = 0x90;
    else if (b == 0xf4)
        u->high = 0x8f;
    return 0;
}

int utf8_check_feed(struct utf8_check *u, const void *bytes, size_t n)
{
    const uint8_t *b = bytes;
    for (size_t i = 0; i < n; i++, u->offset++) {
        if (u->pending == 0) {
            u->bad_offset = u->offset;
            if (utf8_begin(u, b[i]) < 0)
                return -1;
        } else if (b[i] < u->low || b[i] > u->high) {
            u->bad_offset = u->offset;
            return -1;
        } else {
            u->pending--;
            u->low = 0x80;
            u->high = 0xbf;
        }
    }
    return 0;
}

int utf8_check_end(struct utf8_check *u)
{
    return u->pending == 0 ? 0 : -1;
}
