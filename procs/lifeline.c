#include "procs/lifeline.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "procs/error.h"

/* One per process, like its parent. */
static int ends[2] = {-1, -1};

int lifeline_open(void)
{
    if (ends[0] < 0 && pipe2(ends, O_CLOEXEC) < 0)
        return error_set(ERROR_FAILED, "pipe: %s", strerror(errno));
    return 0;
}

int lifeline_tie(int parent)
{
    if (dup2(ends[0], STDIN_FILENO) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        return -1;
    return getppid() == parent ? 0 : -1; /* it may have died before prctl took effect */
}

int lifeline_is_cut(void)
{
    struct pollfd end = {.fd = STDIN_FILENO};
    return poll(&end, 1, 0) > 0 && (end.revents & POLLHUP);
}
