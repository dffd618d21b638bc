/*
 * The child that tokenizes: tools/tokenizer/mtlaunch_tokenizer.py in its own Python environment.
 *
 * It is in a process group of its own and ends with the launcher; a signal to the launcher ends the
 * whole group at once, since nothing half written is ever believed. Its standard output is the
 * protocol described in that program, its standard error goes line by line into the log.
 */
#ifndef LAUNCHER_TOKENIZER_CHILD_H
#define LAUNCHER_TOKENIZER_CHILD_H

#include "launcher/launcher.h"

enum { TOKENIZER_SILENCE_S = 600 }; /* a child that says nothing for so long is ended */

/* Where program and environment lie, beside this program; see tokenizer_place(). */
struct tokenizer_place {
    char program[LAUNCHER_PATH_BYTES];      /* the folder of mtlaunch_tokenizer.py */
    char environment[LAUNCHER_PATH_BYTES];  /* its bin/python runs it */
    char command[LAUNCHER_PATH_BYTES + 64]; /* what makes the environment */
};

/* In a checkout tools/tokenizer and build/tokenizer, else ../libexec/mtlaunch/tokenizer and venv in
 * it. ERROR_FAILED: there is no program. */
int tokenizer_place(struct tokenizer_place *place);

/* 0 if the environment is there and has the packages that the program pins; else ERROR_USER with
 * the command that makes it. */
int tokenizer_check(const struct tokenizer_place *place);

/* Receives what the child answers, "name index value" lines, in order. */
struct tokenizer_reply {
    void (*take)(void *context, const char *name, uint64_t index, const char *value);
    void *context;
};

/* Starts it on `job` (n bytes, the program's standard input). `reply`: NULL when none is expected.
 */
struct tokenizer_child;
int tokenizer_start(struct tokenizer_child **child, struct launcher *l,
                    const struct tokenizer_place *place, const char *job, size_t n,
                    const struct tokenizer_reply *reply);

/* What it has said since; never waits. 1: it goes on. 0: it has ended well. Negative: it has
 * failed, or was silent for too long. Unless 1, it is gone and *child is NULL. */
int tokenizer_turn(struct tokenizer_child **child);

/* Ends it wherever it is; *child may be NULL. */
void tokenizer_kill(struct tokenizer_child **child);

/* All of that to its end. ERROR_STOPPED: a signal to the launcher. */
int tokenizer_run(struct launcher *l, const struct tokenizer_place *place, const char *job,
                  size_t n, const struct tokenizer_reply *reply);

#endif
