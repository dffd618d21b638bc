#include "procs/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char *panic_buffer;
static size_t panic_bytes;

void check_set_panic_buffer(char *buffer, size_t bytes)
{
    panic_buffer = buffer;
    panic_bytes = bytes;
}

_Noreturn void check_failed(const char *file, int line, const char *function, const char *condition)
{
    char text[512];
    int n =
        snprintf(text, sizeof text, "%s:%d: %s: CHECK(%s) failed", file, line, function, condition);
    if (n > 0 && panic_buffer)
        (void)snprintf(panic_buffer, panic_bytes, "%s", text);
    (void)fprintf(stderr, "%s\n", text);
    abort();
}
