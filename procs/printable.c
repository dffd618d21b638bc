#include "procs/printable.h"

enum { ESCAPED_BYTES_MAX = 8 }; /* "\xc2\x9f" */

unsigned printable_control_bytes(const unsigned char *at)
{
    if (at[0] < 0x20 || at[0] == 0x7f)
        return 1;
    return at[0] == 0xc2 && at[1] >= 0x80 && at[1] <= 0x9f ? 2 : 0;
}

/* The next character of *at, escaped if need be; advances. The length in `out`. */
static size_t next_piece(const unsigned char **at, char out[ESCAPED_BYTES_MAX + 1])
{
    unsigned controls = **at == '\n' || **at == '\t' ? 0 : printable_control_bytes(*at);
    size_t n = 0;
    for (unsigned i = 0; i < controls; i++)
        n += (size_t)snprintf(out + n, 5, "\\x%02x", (*at)[i]);
    if (controls == 0)
        out[n++] = (char)**at;
    *at += controls ? controls : 1;
    return n;
}

size_t printable_copy(char *out, size_t bytes, const char *text)
{
    size_t used = 0;
    char piece[ESCAPED_BYTES_MAX + 1];
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        size_t n = next_piece(&at, piece);
        if (used + n >= bytes)
            break;
        for (size_t i = 0; i < n; i++)
            out[used++] = piece[i];
    }
    if (bytes > 0)
        out[used] = '\0';
    return used;
}

void printable_put(const char *text, FILE *stream)
{
    char piece[ESCAPED_BYTES_MAX + 1];
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        size_t n = next_piece(&at, piece);
        (void)fwrite(piece, 1, n, stream); /* a message that nobody takes is nobody's */
    }
}
