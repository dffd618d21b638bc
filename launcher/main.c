/* mtlaunch: see command.c for the commands, supervisor.c for the life of a run. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launcher/command.h"
#include "procs/error.h"

/* A file that is opened where a standard stream is missing would take our messages. */
static int open_standard_streams(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    return fd < 0 ? -1 : close(fd);
}

/* What a command found out and could not print is not done. */
static int close_output(int status)
{
    int bad = ferror(stdout) != 0;
    if (fflush(stdout) == 0 && !bad)
        return status;
    (void)fprintf(stderr, "mtlaunch: standard output: cannot be written: %s\n", strerror(errno));
    return status ? status : ERROR_FAILED;
}

int main(int argc, char **argv)
{
    /* whoever started us may ignore it; the kernel would then reap our children, and nobody would
     * know how they ended */
    (void)signal(SIGCHLD, SIG_DFL);
    /* past a file size limit (ulimit -f) a write fails and can be told of; workers inherit it */
    (void)signal(SIGXFSZ, SIG_IGN);
    return open_standard_streams() < 0 ? 1 : close_output(command_main(argc, argv));
}
