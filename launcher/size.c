#include "launcher/size.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

__extension__ typedef unsigned __int128 uint128;

static const struct unit {
    const char *name;
    uint64_t bytes;
} units[] = {
    {"B", 1},
    {"KB", 1000},
    {"kB", 1000},
    {"MB", 1000000},
    {"GB", 1000000000},
    {"TB", 1000000000000},
    {"PB", 1000000000000000},
    {"KiB", (uint64_t)1 << 10},
    {"MiB", (uint64_t)1 << 20},
    {"GiB", (uint64_t)1 << 30},
    {"TiB", (uint64_t)1 << 40},
    {"PiB", (uint64_t)1 << 50},
};

enum { DIGITS_MAX = 18 }; /* below INT64_MAX; times the largest unit it still fits 128 bits */

/* Appends the digits at *text to *number and returns how many there were, or -1 for too many. */
static int read_digits(const char **text, uint64_t *number)
{
    int count = 0;
    for (; **text >= '0' && **text <= '9'; (*text)++) {
        if (++count > DIGITS_MAX)
            return -1;
        *number = *number * 10 + (uint64_t)(**text - '0');
    }
    return count;
}

static uint64_t unit_bytes(const char *name)
{
    const struct unit *end = units + sizeof units / sizeof *units;
    for (const struct unit *unit = units; unit < end; unit++) {
        if (strcmp(name, unit->name) == 0)
            return unit->bytes;
    }
    return 0;
}

int size_parse(const char *text, uint64_t *bytes)
{
    uint64_t whole = 0, fraction = 0, fraction_scale = 1;
    if (read_digits(&text, &whole) < 1)
        return -1;
    if (*text == '.') {
        text++;
        int digits = read_digits(&text, &fraction);
        if (digits < 1)
            return -1;
        for (; digits > 0; digits--)
            fraction_scale *= 10;
    }
    if (*text == ' ')
        text++;
    uint64_t unit = unit_bytes(text);
    uint128 part = (uint128)fraction * unit;
    uint128 total = (uint128)whole * unit + part / fraction_scale;
    if (unit == 0 || part % fraction_scale != 0 || total > INT64_MAX)
        return -1;
    *bytes = (uint64_t)total;
    return 0;
}

const char *size_format(char *text, size_t text_bytes, uint64_t bytes)
{
    static const char *const names[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    size_t unit = 0;
    double shown = (double)bytes;
    while (shown >= 999.5 && unit + 1 < sizeof names / sizeof *names) {
        shown /= 1000.0;
        unit++;
    }
    (void)snprintf(text, text_bytes, "%.3g %s", shown, names[unit]);
    return text;
}

const char *size_format_duration(char *text, size_t text_bytes, double seconds)
{
    if (!(seconds >= 0.0) || seconds >= 1e15) {
        (void)snprintf(text, text_bytes, "unknown");
        return text;
    }
    unsigned long long s = (unsigned long long)llround(seconds);
    if (s < 60)
        (void)snprintf(text, text_bytes, "%llu s", s);
    else if (s < 3600)
        (void)snprintf(text, text_bytes, "%llu min %llu s", s / 60, s % 60);
    else if (s < 86400)
        (void)snprintf(text, text_bytes, "%llu h %llu min", s / 3600, s / 60 % 60);
    else
        (void)snprintf(text, text_bytes, "%llu d %llu h", s / 86400, s / 3600 % 24);
    return text;
}
