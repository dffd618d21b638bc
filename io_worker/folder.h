/*
 * Folders and small files, durably: what the cache and the export both need.
 */
#ifndef IO_WORKER_FOLDER_H
#define IO_WORKER_FOLDER_H

#include <stddef.h>
#include <stdint.h>

#include "procs/error.h"

/* Whose fault a failed open, mkdir or rename is: ERROR_USER where the path or its permissions are
 * (EACCES, EROFS, ENOTDIR, ...), else ERROR_FAILED. */
enum error_kind folder_error_kind(int error);

/* Creates `path` and its parents where they are absent; their names are durable then. -ERROR_USER:
 * too long, not permitted, a file where a folder should be; else -ERROR_FAILED. */
int folder_create(const char *path);

/* The folder of a path, or of its parent: allocated, freed by the caller. "a" -> ".". */
char *folder_parent(const char *path);

/* Makes names in the folder durable (fsync). -ERROR_FAILED. */
int folder_sync(const char *path);

/* Writes folder/name and fsyncs it. -ERROR_FAILED. */
int folder_write_file(const char *folder, const char *name, const void *bytes, size_t n);

/* 1 when folder/name exists, whatever it is. */
int folder_has(const char *folder, const char *name);

#endif
