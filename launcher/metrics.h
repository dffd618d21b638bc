/*
 * metrics.jsonl: exactly one step line per committed step, and events.
 *
 * A step's line is durable before the record that commits the step is asked for, so a committed
 * step never lacks its line. After a crash the file may hold lines of steps that were not
 * committed, or a torn last line: metrics_open() removes both, and nothing else, so that a redone
 * step writes its line once more but stands there once.
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

/* Appends one line, `json` without newline. */
int metrics_append(struct metrics *metrics, const char *json);

/* All lines so far are durable. */
int metrics_flush(struct metrics *metrics);

/* {"event": name, "time": UTC, ...}: `fields` is "" or ", \"key\": value...". Errors are told on
 * stderr once: an event that cannot be written stops no training. */
void metrics_event(struct metrics *metrics, const char *name, const char *fields);

/* Text as a JSON string, quotes included; control bytes escaped, bytes that are no UTF-8 shown as
 * U+FFFD. */
const char *metrics_quote(char *out, uint64_t bytes, const char *text);

#endif
