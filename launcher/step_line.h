/* The line of a step: in metrics.jsonl before its commit, on the screen after it. */
#ifndef LAUNCHER_STEP_LINE_H
#define LAUNCHER_STEP_LINE_H

#include "launcher/launcher.h"

/* Writes the step's line and makes it durable. */
int step_line_write(struct launcher *l, uint64_t step);

/* Shows a committed step. */
void step_line_show(struct launcher *l, uint64_t step);

/* 32 hexadecimal digits of a stored hash, as `mtlaunch digest` prints them. */
void step_line_hash(char text[33], const uint8_t hash[16]);

#endif
