#include "model/folder_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "procs/check.h"
#include "procs/error.h"

static int is_below(const char *path, const char *folder)
{
    size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || (n > 0 && folder[n - 1] == '/'));
}

/* REPOSITORY/snapshots/REVISION -> REPOSITORY/blobs; 0 when the folder lies otherwise. `root` is
 * resolved: no dots, no double slashes. */
static int find_blobs(const char *root, char blobs[PATH_MAX])
{
    static const char snapshots[] = "/snapshots";
    const char *revision = strrchr(root, '/');
    size_t n = (size_t)(revision - root), m = sizeof snapshots - 1;
    if (n <= m || strncmp(root + n - m, snapshots, m) != 0)
        return 0;
    return snprintf(blobs, PATH_MAX, "%.*s/blobs", (int)(n - m), root) < PATH_MAX;
}

static int is_in_tree(const char *real, const char *root)
{
    char blobs[PATH_MAX];
    return is_below(real, root) || (find_blobs(root, blobs) && is_below(real, blobs));
}

static enum error_kind kind_of(int error)
{
    int theirs = error == EACCES || error == EPERM || error == ENOENT || error == ENOTDIR ||
                 error == ELOOP || error == ENAMETOOLONG;
    return theirs ? ERROR_USER : ERROR_FAILED;
}

/* realpath() of folder/name into `real`. 1, 0: absent, or an error. */
static int resolve(const char *path, char real[PATH_MAX])
{
    struct stat status;
    if (realpath(path, real))
        return 1;
    int error = errno;
    if (error == ENOENT && lstat(path, &status) == 0)
        return error_set(ERROR_USER, "%s: expected a file, found a link to nothing", path);
    if (error == ENOENT)
        return 0;
    return error_set(kind_of(error), "%s: cannot open: %s", path, strerror(error));
}

int model_folder_open(const char *folder, const char *name, int *fd)
{
    char path[PATH_MAX], root[PATH_MAX], real[PATH_MAX];
    CHECK(strchr(name, '/') == NULL);
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (n < 0 || n >= (int)sizeof path)
        return error_set(ERROR_USER, "%s: expected a path below %d bytes, found %d", name, PATH_MAX,
                         n);
    int rc = resolve(path, real);
    if (rc <= 0)
        return rc;
    if (!realpath(folder, root))
        return error_set(kind_of(errno), "%s: cannot open: %s", folder, strerror(errno));
    if (!is_in_tree(real, root)) {
        error_set(ERROR_USER, "%s: expected a file of this folder, found a link to %s", path, real);
        return error_hint("links may lead into the folder itself and, in the cache of "
                          "huggingface_hub, into its blobs; put the file there, or name the folder "
                          "that holds it");
    }
    /* resolved: O_NOFOLLOW is for a link that took its place meanwhile */
    *fd = open(real, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (*fd < 0)
        return error_set(kind_of(errno), "%s: cannot open: %s", path, strerror(errno));
    return 1;
}

/* Exactly n; a file that shrinks meanwhile is an error, not a shorter text. */
static int read_exactly(int fd, const char *path, char *bytes, uint64_t n)
{
    for (uint64_t done = 0; done < n;) {
        ssize_t k = read(fd, bytes + done, n - done);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return error_set(ERROR_FAILED, "%s: cannot read: %s", path, strerror(errno));
        if (k == 0)
            return error_set(ERROR_FAILED,
                             "%s: expected %" PRIu64 " bytes, found %" PRIu64
                             " (did it change while being read?)",
                             path, n, done);
        done += (uint64_t)k;
    }
    return 1;
}

static int read_open(int fd, const char *path, uint64_t bytes_max, char **bytes, uint64_t *n)
{
    struct stat status;
    if (fstat(fd, &status) < 0)
        return error_set(ERROR_FAILED, "%s: cannot stat: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(ERROR_USER, "%s: expected a regular file", path);
    *n = (uint64_t)status.st_size;
    if (*n > bytes_max)
        return error_set(ERROR_USER, "%s: expected at most %" PRIu64 " bytes, found %" PRIu64, path,
                         bytes_max, *n);
    *bytes = malloc(*n + 1);
    if (!*bytes)
        return error_set(ERROR_FAILED, "%s: no memory for %" PRIu64 " bytes", path, *n);
    (*bytes)[*n] = '\0';
    int rc = read_exactly(fd, path, *bytes, *n);
    if (rc < 0)
        free(*bytes);
    return rc;
}

int model_folder_read(const char *folder, const char *name, uint64_t bytes_max, char **bytes,
                      uint64_t *n)
{
    char path[PATH_MAX];
    int fd;
    int rc = model_folder_open(folder, name, &fd);
    if (rc <= 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* fits: it was opened */
    rc = read_open(fd, path, bytes_max, bytes, n);
    (void)close(fd); /* was only read */
    return rc;
}

int model_file_read(const char *path, uint64_t bytes_max, char **bytes, uint64_t *n)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO is refused, not waited for */
    if (fd < 0 && errno == ENOENT)
        return 0;
    if (fd < 0)
        return error_set(kind_of(errno), "%s: cannot open: %s", path, strerror(errno));
    int rc = read_open(fd, path, bytes_max, bytes, n);
    (void)close(fd); /* was only read */
    return rc;
}
