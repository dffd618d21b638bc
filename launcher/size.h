/*
 * Sizes and durations as people write and read them.
 *
 * Written: "24GB" is 24 x 10^9 bytes, "24GiB" is 24 x 2^30; "1.5GB" and "1.5 GB" are the same size.
 * Decimals are exact (no binary floating point on the way); a fraction of a byte is an error.
 */
#ifndef LAUNCHER_SIZE_H
#define LAUNCHER_SIZE_H

#include <stddef.h>
#include <stdint.h>

enum { SIZE_TEXT_BYTES_MAX = 32 }; /* enough for what the two formatters write */

/*
 * Reads a number with one of the units B, KB (or kB), MB, GB, TB, PB (powers of 1000) or KiB, MiB,
 * GiB, TiB, PiB (powers of 1024). The unit is not optional: a bare number in quotes is ambiguous.
 * Returns 0, or -1 (no error text: the caller knows where the text stood) if it is not a size or
 * exceeds INT64_MAX bytes, the largest integer TOML can hold.
 */
int size_parse(const char *text, uint64_t *bytes);

/* Decimal units with three significant digits: "0 B", "999 B", "1.5 GB", "27.3 GB". Returns text.
 */
const char *size_format(char *text, size_t text_bytes, uint64_t bytes);

/* "45 s", "12 min 5 s", "3 h 12 min", "5 d 3 h"; negative or not finite: "unknown". Returns text.
 */
const char *size_format_duration(char *text, size_t text_bytes, double seconds);

#endif
