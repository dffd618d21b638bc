/* mtlaunch: see command.c for the commands, supervisor.c for the life of a run. */
#include "launcher/command.h"

int main(int argc, char **argv)
{
    return command_main(argc, argv);
}
