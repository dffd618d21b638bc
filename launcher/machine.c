#include "launcher/machine.h"

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int read_number(const char *path, uint64_t *out)
{
    FILE *f = fopen(path, "re");
    unsigned long long value;
    if (!f)
        return -1;
    int n = fscanf(f, "%llu", &value); /* "max": no number, no limit */
    (void)fclose(f);
    *out = value;
    return n == 1 ? 0 : -1;
}

uint32_t machine_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) < 0)
        return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? (uint32_t)n : 1;
}

/* "0-3,8-11": whether any of these cores is ours. */
static int list_has_our_core(const char *list, const cpu_set_t *ours)
{
    for (const char *p = list; *p >= '0' && *p <= '9';) {
        char *end;
        unsigned long first = strtoul(p, &end, 10), last = first;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long c = first; c <= last && c < CPU_SETSIZE; c++)
            if (CPU_ISSET(c, ours))
                return 1;
        p = *end == ',' ? end + 1 : end;
    }
    return 0;
}

static int node_is_ours(const char *name, const cpu_set_t *ours)
{
    char path[300], list[4096] = "";
    (void)snprintf(path, sizeof path, "/sys/devices/system/node/%s/cpulist", name);
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    char *line = fgets(list, sizeof list, f);
    (void)fclose(f);
    return line && list_has_our_core(list, ours);
}

uint32_t machine_numa_nodes(void)
{
    cpu_set_t ours;
    uint32_t n = 0;
    DIR *dir = opendir("/sys/devices/system/node");
    if (!dir || sched_getaffinity(0, sizeof ours, &ours) < 0) {
        if (dir)
            (void)closedir(dir);
        return 1;
    }
    for (struct dirent *e; (e = readdir(dir));)
        if (strncmp(e->d_name, "node", 4) == 0 && e->d_name[4] >= '0' && e->d_name[4] <= '9')
            n += (uint32_t)node_is_ours(e->d_name, &ours);
    (void)closedir(dir);
    return n ? n : 1;
}

static uint64_t memory_available(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[256];
    unsigned long long kib = 0;
    if (!f)
        return 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
            break;
    (void)fclose(f);
    return (uint64_t)kib * 1024;
}

/* What the files of a memory controller are called. */
struct memory_files {
    const char *limit, *usage, *cache;
};

static const struct memory_files v1_files = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                             "total_inactive_file"};
static const struct memory_files v2_files = {"memory.max", "memory.current", "inactive_file"};

/* Page cache that the kernel gives up before it kills: counted as used, and yet free. */
static uint64_t reclaimable(const char *group, const char *field)
{
    char path[4096], line[256], name[64];
    unsigned long long bytes = 0, value;
    (void)snprintf(path, sizeof path, "%.3900s/memory.stat", group);
    FILE *f = fopen(path, "re");
    while (f && bytes == 0 && fgets(line, sizeof line, f))
        if (sscanf(line, "%63s %llu", name, &value) == 2 && strcmp(name, field) == 0)
            bytes = value;
    if (f)
        (void)fclose(f); /* read only */
    return bytes;
}

/* Room under the limit of one cgroup, a directory; UINT64_MAX without one. */
static uint64_t room_in_group(const char *group, const struct memory_files *files)
{
    char path[4096];
    uint64_t max, used;
    (void)snprintf(path, sizeof path, "%.3900s/%s", group, files->limit);
    if (read_number(path, &max) < 0 || max >= (1ull << 60))
        return UINT64_MAX;
    (void)snprintf(path, sizeof path, "%.3900s/%s", group, files->usage);
    if (read_number(path, &used) < 0)
        return max;
    uint64_t cache = reclaimable(group, files->cache);
    used = used > cache ? used - cache : 0;
    return max > used ? max - used : 0;
}

/* Room under the limits of one cgroup and all above it. */
static uint64_t room_in_hierarchy(const char *root, const char *group,
                                  const struct memory_files *files)
{
    char path[4096], at[2048];
    uint64_t room = UINT64_MAX;
    (void)snprintf(at, sizeof at, "%s", group);
    for (;;) {
        (void)snprintf(path, sizeof path, "%s%s", root, at);
        uint64_t here = room_in_group(path, files);
        room = here < room ? here : room;
        char *slash = strrchr(at, '/');
        if (!slash || !at[1])
            return room;
        if (slash == at)
            slash++;
        *slash = '\0';
    }
}

static uint64_t cgroup_room(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[2048];
    uint64_t room = UINT64_MAX, here = UINT64_MAX;
    if (!f)
        return room;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        char *group = strchr(line, ':');
        group = group ? strchr(group + 1, ':') : NULL;
        if (!group)
            continue;
        if (strncmp(line, "0::", 3) == 0)
            here = room_in_hierarchy("/sys/fs/cgroup", group + 1, &v2_files);
        else if (strstr(line, ":memory:"))
            here = room_in_hierarchy("/sys/fs/cgroup/memory", group + 1, &v1_files);
        room = here < room ? here : room;
    }
    (void)fclose(f);
    return room;
}

uint64_t machine_ram_budget(void)
{
    uint64_t free_now = memory_available(), room = cgroup_room();
    uint64_t least = room < free_now ? room : free_now;
    return least / 10 * 8;
}
