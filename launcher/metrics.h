/*
 * metrics.jsonl: exactly one step line per committed step, and events.
 *
 * A step's line is durable before the record that commits the step is asked for, so a committed
 * step never lacks its line. After a crash the file may hold lines of steps that were not
 * committed, or a torn last line: metrics_open() removes both, and nothing else, so that a redone
 * step writes its line once more but stands there once. The file's name is durable before its first
 * line.
 *
 * A full disk pauses a run instead of ending it: step lines that find no room are kept in memory,
 * metrics_flush() says METRICS_FULL until all of them are in the file and durable, and no step is
 * committed before. Events that find no room are left out. The file never holds a part of a line.
 */
#ifndef LAUNCHER_METRICS_H
#define LAUNCHER_METRICS_H

#include <stdint.h>

struct metrics;

/* 1 if `directory`/metrics.jsonl has a step line: a step of this run was complete once. */
int metrics_has_steps(const char *directory);

/* Opens `directory`/metrics.jsonl and cuts step lines past `committed`. */
int metrics_open(struct metrics **metrics, const char *directory, uint64_t committed);
void metrics_close(struct metrics *metrics);

/* The newest step whose evaluation the file told to its end when it was opened, with a sample for
 * each of `prompts`; 0 without one. */
uint64_t metrics_last_evaluation(const struct metrics *metrics, uint64_t prompts);

/* Appends a step's line, `json` without newline; on a full disk it is kept for metrics_flush(). */
int metrics_append(struct metrics *metrics, const char *json);

/* 0: all step lines so far are durable. METRICS_FULL: no room; call again. -ERROR_FAILED: another
 * failure, or no room for METRICS_FULL_S. */
enum { METRICS_FULL = 1, METRICS_FULL_S = 3600 };
int metrics_flush(struct metrics *metrics);

/* How long lines wait for room at most, in seconds; the file. */
double metrics_patience_s(void);
const char *metrics_path(const struct metrics *metrics);

/* {"event": name, "time": UTC, ...}: `fields` is "" or ", \"key\": value...". Errors are told on
 * stderr once: an event that cannot be written stops no training. */
void metrics_event(struct metrics *metrics, const char *name, const char *fields);

/* Text as a JSON string, quotes included; control bytes escaped, bytes that are no UTF-8 shown as
 * U+FFFD. */
const char *metrics_quote(char *out, uint64_t bytes, const char *text);

#endif
