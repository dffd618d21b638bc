#include "launcher/findings.h"

#include <stdio.h>

#include "ipc/page_image.h"
#include "ipc/worker.h"
#include "launcher/metrics.h"
#include "launcher/progress.h"

static void tell(struct launcher *l, const char *name, const struct recompute_finding *f)
{
    const char *part = page_part_name((enum page_part)(f->part % PART_COUNT));
    char fields[512];
    (void)snprintf(fields, sizeof fields,
                   ", \"worker\": \"%s\", \"step\": %llu, \"page\": %llu, \"block\": %llu, "
                   "\"element\": %llu, \"part\": \"%s\", \"cores\": [%d, %d, %d], \"wrong_core\": "
                   "%d",
                   name, (unsigned long long)f->step, (unsigned long long)f->page,
                   (unsigned long long)f->block, (unsigned long long)f->element, part, f->cores[0],
                   f->cores[1], f->cores[2], f->cores[f->wrong != 0]);
    metrics_event(l->metrics, "recompute", fields);
    progress_warn(
        l->progress,
        "%s: step %llu, page %llu, block %llu: %s of element %llu came out differently on "
        "cores %d and %d; core %d agrees with core %d, whose result is used: test "
        "processor (core %d) and memory",
        name, (unsigned long long)f->step, (unsigned long long)f->page,
        (unsigned long long)f->block, part, (unsigned long long)f->element, f->cores[0],
        f->cores[1], f->cores[2], f->cores[f->wrong == 0], f->cores[f->wrong != 0]);
}

static void tell_of_worker(struct launcher *l, uint32_t index)
{
    const struct worker_control *opt = l->session.opt[index];
    uint64_t *told = &l->session.findings_told[index];
    uint64_t n = atomic_load_explicit(&opt->n_findings, memory_order_acquire);
    char name[MESSAGE_PEER_BYTES];
    worker_name(name, ROLE_OPT, index);
    if (n - *told > CONTROL_FINDINGS) {
        progress_warn(l->progress, "%s: %llu more blocks came out differently", name,
                      (unsigned long long)(n - *told - CONTROL_FINDINGS));
        *told = n - CONTROL_FINDINGS;
    }
    for (; *told < n; (*told)++)
        tell(l, name, &opt->findings[*told % CONTROL_FINDINGS]);
}

void findings_tell(struct launcher *l)
{
    for (uint32_t i = 0; i < l->session.plan->opt_workers; i++)
        tell_of_worker(l, i);
}
