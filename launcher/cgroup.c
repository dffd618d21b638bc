#include "launcher/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "procs/log.h"

enum { CGROUP_PATH_BYTES = 4096, LINE_BYTES = 8192, REMOVE_TRIES = 100, REMOVE_PAUSE_US = 5000 };

/* One per process, as a process is in one. */
static struct {
    char path[CGROUP_PATH_BYTES + 64];
    int procs_fd; /* its cgroup.procs, to be written by the children; -1: there is none */
} self = {.procs_fd = -1};

/* -- where we are -- */

/* "5:pids:/a/b" or "0::/a/b": the path, if the line is of this hierarchy. */
static const char *path_of_line(const char *line, const char *controller)
{
    const char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
    size_t n = path ? (size_t)(path - names - 1) : 0;
    if (!path || strlen(controller) != n || strncmp(names + 1, controller, n) != 0)
        return NULL;
    return path + 1;
}

static int own_path(const char *controller, char *out, size_t bytes)
{
    char line[LINE_BYTES];
    int found = 0;
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && !found && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        const char *path = path_of_line(line, controller);
        found = path && snprintf(out, bytes, "%s", path) < (int)bytes;
    }
    if (f)
        (void)fclose(f); /* read only */
    return found;
}

/* 1 if this line of mountinfo is a mount of the hierarchy: its mount point and which of its
 * directories is mounted. */
static int is_mount_of(const char *line, const char *controller, char *root, char *point)
{
    char type[64], options[1024];
    const char *rest = strstr(line, " - ");
    if (!rest || sscanf(line, "%*d %*d %*s %4095s %4095s", root, point) != 2 ||
        sscanf(rest, " - %63s %*s %1023s", type, options) != 2)
        return 0;
    if (!controller[0])
        return strcmp(type, "cgroup2") == 0;
    char list[1100], wanted[64];
    (void)snprintf(list, sizeof list, ",%s,", options);
    (void)snprintf(wanted, sizeof wanted, ",%s,", controller);
    return strcmp(type, "cgroup") == 0 && strstr(list, wanted) != NULL;
}

/* The directory of our own group: below the mount point, less what the mount leaves out. */
static int own_directory(const char *controller, char *out, size_t bytes)
{
    char path[CGROUP_PATH_BYTES], root[CGROUP_PATH_BYTES], point[CGROUP_PATH_BYTES],
        line[LINE_BYTES];
    int found = 0;
    FILE *f = own_path(controller, path, sizeof path) ? fopen("/proc/self/mountinfo", "re") : NULL;
    while (f && !found && fgets(line, sizeof line, f))
        found = is_mount_of(line, controller, root, point);
    if (f)
        (void)fclose(f); /* read only */
    if (!found)
        return 0;
    size_t skip =
        strcmp(root, "/") != 0 && strncmp(path, root, strlen(root)) == 0 ? strlen(root) : 0;
    const char *below = strcmp(path + skip, "/") == 0 ? "" : path + skip;
    return snprintf(out, bytes, "%s%s", point, below) < (int)bytes;
}

/* -- leftovers -- */

/* An empty group of a launcher that is gone; the kernel removes none that has processes. */
static void sweep(const char *directory)
{
    char path[CGROUP_PATH_BYTES + 300];
    DIR *dir = opendir(directory);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        unsigned id;
        int pid, end = 0;
        if (sscanf(e->d_name, "mtlaunch-%8x-%d%n", &id, &pid, &end) != 2 || e->d_name[end] ||
            pid <= 0 || kill(pid, 0) == 0 || errno != ESRCH)
            continue;
        (void)snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        (void)rmdir(path);
    }
    if (dir)
        (void)closedir(dir); /* read only */
}

/* -- its life -- */

static int make(const char *controller, const uint8_t id[RUN_ID_BYTES])
{
    char directory[CGROUP_PATH_BYTES], procs[CGROUP_PATH_BYTES + 96];
    if (!own_directory(controller, directory, sizeof directory))
        return 0;
    sweep(directory);
    (void)snprintf(self.path, sizeof self.path, "%s/mtlaunch-%02x%02x%02x%02x-%d", directory, id[0],
                   id[1], id[2], id[3], (int)getpid());
    (void)snprintf(procs, sizeof procs, "%s/cgroup.procs", self.path);
    if (mkdir(self.path, 0755) < 0 && errno != EEXIST)
        return 0;
    self.procs_fd = open(procs, O_WRONLY | O_CLOEXEC);
    if (self.procs_fd < 0)
        (void)rmdir(self.path);
    return self.procs_fd >= 0;
}

void cgroup_open(const uint8_t id[RUN_ID_BYTES])
{
    if (make("", id) || make("pids", id))
        log_line(LOG_INFO, "the workers' cgroup is %s", self.path);
    else
        log_line(LOG_INFO, "no cgroup for the workers: none that may be written to");
}

void cgroup_enter(void)
{
    if (self.procs_fd >= 0)
        (void)!write(self.procs_fd, "0", 1); /* a convenience: without it, it stays where it is */
}

static void kill_all(void)
{
    char path[CGROUP_PATH_BYTES + 96];
    (void)snprintf(path, sizeof path, "%s/cgroup.kill", self.path);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;               /* v1: the workers are killed one by one, and have no children */
    (void)!write(fd, "1", 1); /* nobody is in it any more but after an accident */
    (void)close(fd);          /* write has told */
}

void cgroup_close(void)
{
    if (self.procs_fd < 0)
        return;
    kill_all();
    for (int i = 0; rmdir(self.path) < 0 && errno == EBUSY && i < REMOVE_TRIES; i++)
        (void)usleep(REMOVE_PAUSE_US);
    (void)close(self.procs_fd); /* nothing is pending */
    self.procs_fd = -1;
}
