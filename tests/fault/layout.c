/*
 * Prints, as one JSON object, where things lie in the shared segment of a run whose plan stands at
 * the start of the file FILE: rings, pools, page tables, and the counters that tests wait for. A
 * test then reads and changes the segment from outside, through /proc/<launcher>/fd/<segment>.
 *
 *     layout FILE
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#include "io_worker/commit.h"
#include "io_worker/page_tables.h"
#include "ipc/control.h"
#include "ipc/page_image.h"
#include "ipc/page_table.h"
#include "ipc/plan.h"
#include "ipc/ring.h"
#include "ipc/topology.h"

#define ORDER(field)                                                                               \
    (void)printf("\"%s\": %llu, ", #field,                                                         \
                 (unsigned long long)(plan->regions[REGION_LAUNCHER_CONTROL].offset +              \
                                      offsetof(struct launcher_control, field)))
#define FACT(field)  (void)printf("\"%s\": %zu, ", #field, offsetof(struct worker_control, field))
#define FIELD(field) (void)printf("\"%s\": %zu, ", #field, offsetof(struct ring_descriptor, field))

static void print_regions(const struct plan *plan)
{
    (void)printf("\"regions\": {");
    for (int r = 0; r < REGION_COUNT; r++)
        (void)printf(
            "%s\"%s\": {\"offset\": %llu, \"stride\": %llu, \"frame_stride\": %llu, "
            "\"frame_bytes\": %llu}",
            r ? ", " : "", topology_regions[r].name, (unsigned long long)plan->regions[r].offset,
            (unsigned long long)plan->regions[r].stride, (unsigned long long)plan->pools[r].stride,
            (unsigned long long)plan->pools[r].frame_bytes);
    (void)printf("}, ");
}

static void print_rings(const struct plan *plan)
{
    (void)printf("\"rings\": {");
    for (int r = 0; r < RING_COUNT; r++)
        (void)printf(
            "%s\"%s\": {\"producer\": %llu, \"producer_stride\": %llu, \"consumer\": %llu, "
            "\"consumer_stride\": %llu, \"depth\": %llu, \"pool\": \"%s\", \"from\": \"%s\", "
            "\"to\": \"%s\"}",
            r ? ", " : "", topology_rings[r].name,
            (unsigned long long)plan->ring_producers[r].offset,
            (unsigned long long)plan->ring_producers[r].stride,
            (unsigned long long)plan->ring_consumers[r].offset,
            (unsigned long long)plan->ring_consumers[r].stride,
            (unsigned long long)plan->ring_depth[r], topology_regions[topology_rings[r].pool].name,
            topology_role_name(topology_rings[r].from), topology_role_name(topology_rings[r].to));
    (void)printf("}, ");
}

static void print_page_table(const struct plan *plan)
{
    struct page_image_layout layout;
    enum dtype_mode dtype = plan->bf16 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32;
    page_image_layout(&layout, dtype, plan->page_elements);
    (void)printf("\"page_table\": {\"state_bytes\": %d, \"states\": %d, \"tables\": %d, "
                 "\"entry_bytes\": %zu, \"state\": %zu, \"sequence\": %zu, \"place\": %zu, "
                 "\"slot\": %zu, \"version\": %zu, \"digest\": %zu}, ",
                 PAGE_TABLE_STATE_BYTES, PAGE_TABLE_STATES, PAGE_TABLE_PLACES,
                 sizeof(struct page_entry), sizeof(struct page_tables_state),
                 offsetof(struct page_tables_state, sequence),
                 offsetof(struct page_tables_state, place), offsetof(struct page_entry, slot),
                 offsetof(struct page_entry, version), offsetof(struct page_entry, digest));
    (void)printf("\"image\": {\"offset\": [%llu, %llu, %llu, %llu], \"capacity\": [%llu, %llu, "
                 "%llu, %llu], \"page\": %zu, \"version\": %zu}",
                 (unsigned long long)layout.offset[0], (unsigned long long)layout.offset[1],
                 (unsigned long long)layout.offset[2], (unsigned long long)layout.offset[3],
                 (unsigned long long)layout.capacity[0], (unsigned long long)layout.capacity[1],
                 (unsigned long long)layout.capacity[2], (unsigned long long)layout.capacity[3],
                 offsetof(struct page_image_header, page),
                 offsetof(struct page_image_header, version));
}

static void print_layout(const struct plan *plan)
{
    (void)printf("{\"opt_workers\": %u, \"orders\": {", plan->opt_workers);
    ORDER(begin_step);
    ORDER(apply_step);
    ORDER(commit_step);
    (void)printf("\"\": 0}, \"facts\": {");
    FACT(pid);
    FACT(backward_step);
    FACT(norm_step);
    FACT(complete_step);
    FACT(committed_step);
    (void)printf("\"\": 0}, \"descriptor\": {");
    FIELD(frame);
    FIELD(out_frame);
    FIELD(page);
    FIELD(step);
    (void)printf("\"bytes\": %zu, \"first\": %zu}, ", sizeof(struct ring_descriptor),
                 offsetof(struct ring_producer_area, descriptors));
    print_regions(plan);
    print_rings(plan);
    print_page_table(plan);
    (void)printf("}\n");
}

int main(int argc, char **argv)
{
    static struct plan plan;
    int fd = argc == 2 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 || pread(fd, &plan, sizeof plan, 0) != (ssize_t)sizeof plan ||
        plan.magic != PLAN_MAGIC) {
        (void)fprintf(stderr, "layout: no plan there\n");
        return 1;
    }
    print_layout(&plan);
    return 0;
}
