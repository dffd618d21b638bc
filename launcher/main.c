/* mtlaunch: see command.c for the commands, supervisor.c for the life of a run. */
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "launcher/command.h"

/* A file that is opened where a standard stream is missing would take our messages. */
static int open_standard_streams(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    return fd < 0 ? -1 : close(fd);
}

int main(int argc, char **argv)
{
    /* whoever started us may ignore it; the kernel would then reap our children, and nobody would
     * know how they ended */
    (void)signal(SIGCHLD, SIG_DFL);
    return open_standard_streams() < 0 ? 1 : command_main(argc, argv);
}
