/*
 * CHECK: programmer errors. Always on, in every build.
 *
 * A failed CHECK means that this program is wrong, never that its input was. The text is written to
 * stderr and, where check_set_panic_buffer() named one (a worker's control page), into shared
 * memory, so that the launcher can tell it in the obituary after the process is gone; then abort().
 */
#ifndef PROCS_CHECK_H
#define PROCS_CHECK_H

#include <stddef.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (__builtin_expect(!(condition), 0))                                                     \
            check_failed(__FILE__, __LINE__, __func__, #condition);                                \
    } while (0)

_Noreturn void check_failed(const char *file, int line, const char *function,
                            const char *condition);

/* `buffer` outlives the process that writes it (shared memory). */
void check_set_panic_buffer(char *buffer, size_t bytes);

#endif
