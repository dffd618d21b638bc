/*
 * One log file per process: <output_dir>/logs/<role>.log, one line per event.
 *
 *     2025-01-31T12:00:00.123456Z io_worker INFO  store opened: 3 directories, 41.2 GB
 *
 * A line is formatted in a buffer on the stack and leaves in one write(2), so lines never mix, and
 * nothing is allocated. Control bytes are escaped (\n, \x1b): a name from a file cannot forge a
 * line or drive a terminal. A longer line than LOG_LINE_BYTES_MAX is cut and ends in "...".
 *
 * A file that would pass `max_bytes` becomes <role>.log.1 (the older .1 is replaced), so two are
 * kept. A log that cannot be written never stops training: stderr is told once, lines lost are
 * counted, and the count is told in the first line that gets through. Without log_open() lines go
 * to stderr.
 *
 * One writer per file: the main loop's thread. Not for signal handlers.
 */
#ifndef PROCS_LOG_H
#define PROCS_LOG_H

#include <stdint.h>

#define LOG_LEVELS(X)                                                                              \
    X(LOG_ERROR, "ERROR")                                                                          \
    X(LOG_WARN, "WARN")                                                                            \
    X(LOG_INFO, "INFO")                                                                            \
    X(LOG_DEBUG, "DEBUG")

#define X(id, name) id,
enum log_level { LOG_LEVELS(X) LOG_LEVEL_COUNT };
#undef X

enum { LOG_LINE_BYTES_MAX = 4096 };

/*
 * Appends to `dir`/`name`.log, creating `dir` if needed (its parent exists). `max_bytes` limits
 * each of the two files kept; 0 = no limit. Returns 0, also on a full disk (lines are lost until
 * there is room), or a negative error (error.h) and stays on stderr.
 */
int log_open(const char *dir, const char *name, uint64_t max_bytes);

/* Writes one line, if `level` is at most the threshold (LOG_INFO at start). errno is preserved. */
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

void log_set_threshold(enum log_level level);

/* Lines that could not be written since the process started. */
uint64_t log_lines_lost(void);

/* Back to stderr. */
void log_close(void);

#endif
