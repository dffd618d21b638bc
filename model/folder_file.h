/*
 * Files of a model's folder, and of no other place.
 *
 * A folder comes from elsewhere: an archive, a hub, a colleague. A name in it must not lead to
 * files of this machine, neither by "../" (the callers' names are fixed, or checked for separators)
 * nor by a symbolic link. Links are followed as long as they stay in the model's own tree:
 *
 *     the folder itself, resolved: model.path may be a link
 *     blobs/ beside snapshots/, where the folder is REPOSITORY/snapshots/REVISION, as the cache of
 *     huggingface_hub lays a model out: snapshots/REVISION/NAME -> ../../blobs/HASH
 *
 * Everything else is refused, absolute targets too, unless they come back into the tree.
 */
#ifndef MODEL_FOLDER_FILE_H
#define MODEL_FOLDER_FILE_H

#include <stdint.h>

/*
 * Opens folder/name for reading; never waits (a FIFO), so ask fstat() what it is. `name` has no
 * separator. Returns 1 and *fd, 0 when there is no such name (no error set).
 * Errors: ERROR_USER for a link out of the tree or to nothing, a path too long or without
 * permission; ERROR_FAILED for I/O.
 */
int model_folder_open(const char *folder, const char *name, int *fd);

/*
 * Reads folder/name, a regular file of at most bytes_max bytes, whole: 1, with *bytes (*n, and a
 * zero byte after them) allocated, freed by the caller; 0 and negative as above. ERROR_USER: not a
 * regular file, larger; ERROR_FAILED: no memory, I/O, it shrinks meanwhile.
 */
int model_folder_read(const char *folder, const char *name, uint64_t bytes_max, char **bytes,
                      uint64_t *n);

/* The same of a file that the user named, wherever its path leads. */
int model_file_read(const char *path, uint64_t bytes_max, char **bytes, uint64_t *n);

#endif
