/* io_worker: owns the store, the pages in RAM and the data. pager.c says how they move. */
#include "io_worker/io.h"
#include "ipc/worker.h"

int main(int argc, char **argv)
{
    struct worker w;
    int rc = worker_start(&w, ROLE_IO, argc, argv);
    if (rc == 0)
        rc = io_run(&w);
    return worker_finish(&w, rc);
}
