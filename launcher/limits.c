#include "launcher/limits.h"

#include <errno.h>
#include <string.h>
#include <sys/resource.h>

#include "launcher/size.h"
#include "procs/error.h"

enum {
    FILES_MIN = 64,              /* log, locks, sockets, pipes */
    FILES_PER_WORKER = 4,        /* in the launcher: pidfd, connections */
    LIBRARIES_BYTES = 512 << 20, /* code, heaps, buffers that are not the device's */
    THREAD_BYTES = 64 << 20,     /* a stack, a buffer of the BLAS */
};

static int check_files(uint64_t needed)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_cur >= needed)
        return 0;
    (void)error_set(ERROR_FIT, "open files: expected to be allowed %llu, found a limit of %llu",
                    (unsigned long long)needed, (unsigned long long)files.rlim_cur);
    return error_hint("`ulimit -n %llu`, or LimitNOFILE= of the service",
                      (unsigned long long)needed);
}

int limits_open(void)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files); /* what it is then is looked at */
    }
    return check_files(FILES_MIN);
}

static int check_bytes(int resource, const char *what, const char *option, uint64_t needed)
{
    struct rlimit limit;
    char need[SIZE_TEXT_BYTES_MAX], have[SIZE_TEXT_BYTES_MAX];
    if (getrlimit((__rlimit_resource_t)resource, &limit) < 0 || limit.rlim_cur >= needed)
        return 0;
    (void)error_set(ERROR_FIT, "%s: each worker needs %s and its device buffers, the limit is %s",
                    what, size_format(need, sizeof need, needed),
                    size_format(have, sizeof have, limit.rlim_cur));
    return error_hint("`ulimit %s unlimited`; [memory] max_ram is the limit that is kept to",
                      option);
}

int limits_check(const struct plan *plan)
{
    uint64_t own = LIBRARIES_BYTES + (uint64_t)plan->threads * THREAD_BYTES;
    if (check_files(FILES_MIN + (uint64_t)FILES_PER_WORKER * plan->opt_workers) < 0 ||
        check_bytes(RLIMIT_AS, "address space", "-v", own + plan->segment_bytes) < 0 ||
        check_bytes(RLIMIT_DATA, "private memory", "-d", own) < 0)
        return -ERROR_FIT;
    return 0;
}
