/*
 * Operating errors: what went wrong, where, what was expected, what was found, and a hint.
 *
 * Two kinds of failure are never mixed. Operating errors (bad input, a full disk, a short read) are
 * described here and travel up as negative return values. Programmer errors are CHECK() (check.h).
 *
 * The description lives in one fixed buffer per thread, so that reporting an error never allocates.
 * The function that meets the error calls error_set(); each caller that knows more about the
 * "where" puts that in front with error_wrap() while unwinding; the outermost prints error_text():
 *
 *     if (n < want)
 *         return error_set(ERROR_FAILED, "short read: expected %zu bytes, found %zu", want, n);
 *     ...
 *     if (load(path) < 0)
 *         return error_wrap("%s", path);          // "path: short read: expected ..."
 *     ...
 *     error_hint("free some space, then start again"); // appended on its own line
 *
 * The kind is also the exit status of mtlaunch (README, "Exit codes"), so it is chosen where the
 * error is met: a missing key is the user's (2), a full disk before the start does not fit (3).
 */
#ifndef PROCS_ERROR_H
#define PROCS_ERROR_H

enum error_kind {
    ERROR_NONE = 0,
    ERROR_FAILED =
        1, /* an operation failed: I/O error, damaged store, a worker that died too often */
    ERROR_USER = 2, /* anything the user supplied: command line, TOML, model, tokenizer, data */
    ERROR_FIT = 3,  /* does not fit: RAM, VRAM, /dev/shm, disk; found before anything was written */
    ERROR_STOPPED = 4, /* stopped on request, resumable */
    ERROR_BUSY = 5,    /* the run is in use by a live process */
    /* between a worker and the launcher only, never an exit status of mtlaunch: */
    ERROR_ABANDONED = 6, /* another worker died: the operation ends here, the process goes on */
    ERROR_DAMAGED = 7,   /* a ring, a frame, the page table or a slot is not what was written there:
                            restarting this worker alone would meet it again */
};

/* Starts a new description. Returns -kind, so that `return error_set(...)` reads well. */
int error_set(enum error_kind kind, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "text: " in front of the current description. Returns -kind of the current error. */
int error_wrap(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Appends "\n  hint: text". Returns -kind of the current error. */
int error_hint(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Gives the current description another kind. Returns -kind. */
int error_as(enum error_kind kind);

/* The current description, "" if there is none. Valid until the next call in this thread. */
const char *error_text(void);

enum error_kind error_kind_now(void);

void error_clear(void);

/* A static analyzer sees one file at a time; this tells it what the functions promise. */
#if defined(__clang_analyzer__) && !defined(PROCS_ERROR_BODIES)
#define error_set(kind, ...) (error_set(kind, __VA_ARGS__), -(int)(kind) - !(kind))
#define error_wrap(...)      (error_wrap(__VA_ARGS__), -(int)ERROR_FAILED)
#define error_hint(...)      (error_hint(__VA_ARGS__), -(int)ERROR_FAILED)
#endif

#endif
