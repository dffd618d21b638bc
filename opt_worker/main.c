/* opt_worker: AdamW over its share of the pages. The work is in update.c. */
#include "ipc/worker.h"
#include "opt_worker/update.h"

int main(int argc, char **argv)
{
    struct worker w;
    int rc = worker_start(&w, ROLE_OPT, argc, argv);
    if (rc == 0)
        rc = update_run(&w);
    return worker_finish(&w, rc);
}
