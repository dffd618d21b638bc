/*
 * Text for people. File names, model texts and other processes' last words may hold bytes that a
 * terminal obeys; they are shown as \xNN instead.
 */
#ifndef PROCS_PRINTABLE_H
#define PROCS_PRINTABLE_H

#include <stddef.h>
#include <stdio.h>

/* Bytes of the control character at `at`, 0 if it is none: ASCII, DEL, or C1 as UTF-8 (0xc2 0x80 to
 * 0x9f). */
unsigned printable_control_bytes(const unsigned char *at);

/* Copies what fits of `text` into `out`, always terminated; newline and tab stay. The length. */
size_t printable_copy(char *out, size_t bytes, const char *text);

/* The same into a stream, whole. */
void printable_put(const char *text, FILE *stream);

#endif
