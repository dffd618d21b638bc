#include "io_worker/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "procs/check.h"
#include "procs/error.h"

enum error_kind folder_error_kind(int error)
{
    int theirs = error == EACCES || error == EPERM || error == EROFS || error == ENOTDIR ||
                 error == ENAMETOOLONG || error == ELOOP;
    return theirs ? ERROR_USER : ERROR_FAILED;
}

static int is_folder(const char *path)
{
    struct stat there;
    return stat(path, &there) == 0 && S_ISDIR(there.st_mode);
}

/* A name is durable when the folder it stands in was flushed; whoever made ours before us may have
 * died before that. A file system that cannot do it is no reason to stop. */
static void sync_name(const char *path)
{
    char parent[PATH_MAX + 4];
    struct stat there;
    if (stat(path, &there) < 0 || there.st_uid != geteuid())
        return;
    (void)snprintf(parent, sizeof parent, "%s/..", path);
    int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)fsync(fd);
    (void)close(fd); /* a folder opened for reading */
}

int folder_create(const char *folder)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s", folder) >= (int)sizeof path)
        return error_set(ERROR_USER, "%s: path too long", folder);
    for (char *p = path + 1;; p++) {
        char c = *p;
        if (c != '/' && c != '\0')
            continue;
        *p = '\0';
        if (mkdir(path, 0777) < 0 && errno != EEXIST)
            return error_set(folder_error_kind(errno), "%s: cannot create the folder: %s", path,
                             strerror(errno));
        sync_name(path);
        if (c == '\0')
            return is_folder(path)
                       ? 0
                       : error_set(ERROR_USER, "%s: expected a folder, found a file", path);
        *p = c;
    }
}

char *folder_parent(const char *path)
{
    char *copy = strdup(path);
    CHECK(copy != NULL);
    char *parent = strdup(dirname(copy));
    CHECK(parent != NULL);
    free(copy);
    return parent;
}

int folder_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return error_set(ERROR_FAILED, "%s: cannot open: %s", path, strerror(errno));
    int rc = fsync(fd) < 0 ? error_set(ERROR_FAILED, "%s: fsync: %s", path, strerror(errno)) : 0;
    (void)close(fd); /* a folder opened for reading */
    return rc;
}

static int write_fd(int fd, const char *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t k = write(fd, bytes + done, n - done);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return -1;
        done += (size_t)k;
    }
    return fsync(fd);
}

int folder_write_file(const char *folder, const char *name, const void *bytes, size_t n)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name); /* too long: open says so */
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return error_set(ERROR_FAILED, "%s: cannot create: %s", path, strerror(errno));
    int rc = 0;
    if (write_fd(fd, bytes, n) < 0)
        rc = error_set(ERROR_FAILED, "%s: write: %s", path, strerror(errno));
    if (close(fd) < 0 && rc == 0)
        rc = error_set(ERROR_FAILED, "%s: close: %s", path, strerror(errno));
    return rc;
}

int folder_has(const char *folder, const char *name)
{
    char path[PATH_MAX];
    struct stat status;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return 0;
    return lstat(path, &status) == 0;
}
