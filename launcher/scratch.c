#include "launcher/scratch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "launcher/run_dir.h"
#include "procs/error.h"

#define SCRATCH_PREFIX "mtlaunch-cache-"

enum { SCRATCH_AGE_S = 60 }; /* older than the moment between a directory and its lock */

static int open_directory(const char *path)
{
    return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static void sweep_one(const char *path)
{
    struct stat st;
    int fd = open_directory(path);
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && time(NULL) - st.st_mtime > SCRATCH_AGE_S &&
        flock(fd, LOCK_EX | LOCK_NB) == 0)
        (void)run_dir_remove_tree(path); /* the next one tries again */
    (void)close(fd);                     /* a directory */
}

static void sweep(void)
{
    char path[SCRATCH_PATH_BYTES + 256];
    DIR *tmp = opendir("/tmp");
    for (struct dirent *e; tmp && (e = readdir(tmp));) {
        if (strncmp(e->d_name, SCRATCH_PREFIX, strlen(SCRATCH_PREFIX)) != 0)
            continue;
        (void)snprintf(path, sizeof path, "/tmp/%s", e->d_name);
        sweep_one(path);
    }
    if (tmp)
        (void)closedir(tmp); /* read only */
}

int scratch_make(struct scratch *scratch)
{
    sweep();
    (void)snprintf(scratch->path, sizeof scratch->path, "/tmp/" SCRATCH_PREFIX "XXXXXX");
    scratch->fd = mkdtemp(scratch->path) ? open_directory(scratch->path) : -1;
    if (scratch->fd >= 0 && flock(scratch->fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    int rc = error_set(ERROR_FAILED, "/tmp: cannot make a scratch directory: %s", strerror(errno));
    scratch_remove(scratch);
    return rc;
}

void scratch_remove(struct scratch *scratch)
{
    if (scratch->path[0])
        (void)run_dir_remove_tree(scratch->path); /* a leftover in /tmp is no failure */
    if (scratch->path[0] && scratch->fd >= 0)
        (void)close(scratch->fd); /* the lock goes with it */
    scratch->path[0] = '\0';
}
