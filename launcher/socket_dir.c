#include "launcher/socket_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define SOCKET_DIR_PREFIX "mtlaunch-"

enum { SWEEP_AGE_S = 60, NAME_BYTES = sizeof SOCKET_DIR_PREFIX + 5 }; /* mkdtemp's six letters */

/* Without waiting: a launcher that is stopped (Ctrl-Z) lets connections queue up until the queue is
 * full, and would then hold up whoever comes next. */
static int nobody_listens(const struct sockaddr_un *address)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int rc = fd < 0 ? 0 : connect(fd, (const struct sockaddr *)address, sizeof *address);
    int nobody = rc < 0 && (errno == ECONNREFUSED || errno == ENOENT);
    if (fd >= 0)
        (void)close(fd); /* nothing was sent */
    return nobody;
}

void socket_dir_remove_dead(const char *directory, int age_s)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat st;
    int n = snprintf(address.sun_path, sizeof address.sun_path, "%s/ctl", directory);
    int fd = n < 0 || n >= (int)sizeof address.sun_path
                 ? -1
                 : open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && time(NULL) - st.st_mtime >= age_s &&
        nobody_listens(&address)) {
        (void)unlinkat(fd, "ctl", 0); /* may never have been bound */
        (void)rmdir(directory);       /* fails where something else lies in it */
    }
    (void)close(fd); /* a directory */
}

void socket_dir_sweep(void)
{
    char path[sizeof "/tmp/" + NAME_BYTES];
    DIR *tmp = opendir("/tmp");
    for (struct dirent *e; tmp && (e = readdir(tmp));) {
        if (strncmp(e->d_name, SOCKET_DIR_PREFIX, sizeof SOCKET_DIR_PREFIX - 1) != 0 ||
            strlen(e->d_name) != NAME_BYTES)
            continue;
        (void)snprintf(path, sizeof path, "/tmp/%s", e->d_name);
        socket_dir_remove_dead(path, SWEEP_AGE_S);
    }
    if (tmp)
        (void)closedir(tmp); /* read only */
}

int socket_dir_is_there(const char *endpoint)
{
    struct stat st;
    return lstat(endpoint, &st) == 0 && S_ISSOCK(st.st_mode);
}
