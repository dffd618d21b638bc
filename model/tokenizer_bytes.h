/*
 * The built-in tokenizer: an id for each byte, and one that ends a document.
 *
 * It needs no file and loses nothing: any UTF-8 text comes back byte for byte. The vocabulary of
 * the model may be larger (the ids above 256 are never used), never smaller.
 */
#ifndef MODEL_TOKENIZER_BYTES_H
#define MODEL_TOKENIZER_BYTES_H

#include <stddef.h>
#include <stdint.h>

#define TOKENIZER_BYTES_END        256 /* ends a document */
#define TOKENIZER_BYTES_VOCABULARY 257
#define TOKENIZER_BYTES_NAME       "bytes-1" /* identity in caches: ids as above */

/* tokens (n) u16 = bytes (n). */
void tokenizer_bytes_encode(const void *bytes, size_t n, uint16_t *tokens);

/*
 * Appends the byte of `id` to text and returns 1; returns 0 for ids that stand for no byte
 * (TOKENIZER_BYTES_END and above). id >= 0.
 */
size_t tokenizer_bytes_decode(int32_t id, char *text);

/*
 * Streaming check that bytes are UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above
 * U+10FFFF). Start with a zeroed struct, give it the text in pieces of any size, then ask the end:
 *
 *     struct utf8_check u = {0};
 *     while (read a piece)
 *         if (utf8_check_feed(&u, piece, n) < 0) ... u.bad_offset is the first bad byte
 *     if (utf8_check_end(&u) < 0) ... the text stops inside a character that begins at u.bad_offset
 */
struct utf8_check {
    uint64_t offset;     /* bytes seen so far */
    uint64_t bad_offset; /* set when a call returned -1 */
    uint32_t pending;    /* continuation bytes still due */
    uint8_t low, high;   /* range of the next one */
};

int utf8_check_feed(struct utf8_check *u, const void *bytes, size_t n);
int utf8_check_end(struct utf8_check *u);

#endif
