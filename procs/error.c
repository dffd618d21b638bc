#define PROCS_ERROR_BODIES
#include "procs/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { ERROR_TEXT_BYTES_MAX = 4096 };

static _Thread_local char text_now[ERROR_TEXT_BYTES_MAX];
static _Thread_local enum error_kind kind_now;

int error_set(enum error_kind kind, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text_now, sizeof text_now, format, args); /* a longer text is cut, never lost */
    va_end(args);
    kind_now = kind;
    return -(int)kind;
}

int error_wrap(const char *format, ...)
{
    char joined[ERROR_TEXT_BYTES_MAX];
    va_list args;
    va_start(args, format); /* into a second buffer: the arguments may point into the first */
    (void)vsnprintf(joined, sizeof joined, format, args);
    va_end(args);
    size_t used = strlen(joined), room = sizeof joined - 1 - used;
    int kept = room > 2 ? (int)(room - 2) : 0;
    (void)snprintf(joined + used, room + 1, ": %.*s", kept, text_now);
    memcpy(text_now, joined, sizeof text_now);
    return -(int)kind_now;
}

int error_hint(const char *format, ...)
{
    size_t used = strlen(text_now);
    int head = snprintf(text_now + used, sizeof text_now - used, "\n  hint: ");
    if (head > 0 && used + (size_t)head < sizeof text_now) {
        va_list args;
        va_start(args, format);
        used += (size_t)head;
        (void)vsnprintf(text_now + used, sizeof text_now - used, format, args);
        va_end(args);
    }
    return -(int)kind_now;
}

const char *error_text(void)
{
    return text_now;
}

int error_as(enum error_kind kind)
{
    kind_now = kind;
    return -(int)kind;
}

enum error_kind error_kind_now(void)
{
    return kind_now;
}

void error_clear(void)
{
    text_now[0] = '\0';
    kind_now = ERROR_NONE;
}
