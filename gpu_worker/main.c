/* gpu_worker: owns the device. The step is in schedule.c. */
#include "gpu_worker/schedule.h"
#include "ipc/worker.h"

int main(int argc, char **argv)
{
    struct worker w;
    int rc = worker_start(&w, ROLE_GPU, argc, argv);
    if (rc == 0)
        rc = schedule_run(&w);
    return worker_finish(&w, rc);
}
