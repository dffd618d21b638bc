#include "ipc/plan.h"

#include <string.h>
#include <xxhash.h>

#include "ipc/control.h"
#include "ipc/page_table.h"
#include "ipc/ring.h"
#include "procs/check.h"
#include "procs/error.h"

enum { PAGE_BYTES = 4096 };

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

uint64_t plan_check(const struct plan *plan)
{
    struct plan head = *plan;
    head.check = 0;
    uint64_t seed = XXH3_64bits(&head, sizeof head);
    return XXH3_64bits_withSeed(plan + 1, plan->bytes - sizeof head, seed);
}

int plan_text_add(struct plan *plan, uint64_t capacity, const char *text, struct plan_text *out)
{
    uint64_t length = strlen(text) + 1;
    CHECK(plan->bytes >= sizeof *plan); /* else the text would land in the struct */
    if (plan->bytes + length > capacity)
        return error_set(ERROR_USER, "paths, prompts and patterns need more than %llu bytes in all",
                         (unsigned long long)(capacity - sizeof *plan));
    memcpy((char *)plan + plan->bytes, text, length);
    out->offset = plan->bytes;
    plan->bytes += length;
    return 0;
}

int plan_texts_add(struct plan *plan, uint64_t capacity, const char *const *texts, uint64_t count,
                   struct plan_texts *out)
{
    CHECK(plan->bytes >= sizeof *plan);
    uint64_t list = round_up(plan->bytes, sizeof(struct plan_text));
    if (count > PLAN_LISTS_MAX || list + count * sizeof(struct plan_text) > capacity)
        return error_set(ERROR_USER, "a list of %llu texts is too long", (unsigned long long)count);
    plan->bytes = list + count * sizeof(struct plan_text);
    out->offset = list;
    out->count = count;
    for (uint64_t i = 0; i < count; i++) {
        struct plan_text text;
        if (plan_text_add(plan, capacity, texts[i], &text) < 0)
            return -(int)error_kind_now();
        memcpy((char *)plan + list + i * sizeof text, &text, sizeof text);
    }
    return 0;
}

int plan_ids_add(struct plan *plan, uint64_t capacity, const int32_t *ids, uint64_t count,
                 struct plan_ids *out)
{
    CHECK(plan->bytes >= sizeof *plan);
    uint64_t list = round_up(plan->bytes, sizeof *ids);
    if (list > capacity || count > (capacity - list) / sizeof *ids)
        return error_set(ERROR_USER, "prompts of %llu tokens in all are too long",
                         (unsigned long long)count);
    memcpy((char *)plan + list, ids, count * sizeof *ids);
    plan->bytes = list + count * sizeof *ids;
    out->offset = list;
    out->count = count;
    return 0;
}

uint64_t plan_frame_stride(uint64_t bytes)
{
    uint64_t pages = round_up(bytes, PAGE_BYTES) / PAGE_BYTES;
    return (pages | 1) * PAGE_BYTES;
}

static uint64_t region_bytes(const struct plan *plan, const struct model_layout *layout,
                             enum region_id region)
{
    switch (region) {
    case REGION_PLAN:
        return plan->bytes;
    case REGION_LAUNCHER_CONTROL:
        return sizeof(struct launcher_control);
    case REGION_IO_CONTROL:
    case REGION_GPU_CONTROL:
    case REGION_OPT_CONTROL:
        return sizeof(struct worker_control);
    case REGION_NORM:
        if (plan->opt_workers == 0) /* a command without optimizer workers */
            return 0;
        return (layout->n_pages / plan->opt_workers + 1) * sizeof(struct norm_entry);
    case REGION_PAGE_TABLE:
        return page_table_bytes(layout->n_pages);
    case REGION_GENERATED:
        return generated_bytes(plan->generate.prompts.count, plan->generate.max_new_tokens);
    default:
        return plan->pools[region].stride * plan->pools[region].frames;
    }
}

static void place(struct plan *plan, struct plan_region *region, uint64_t bytes, uint64_t instances)
{
    region->offset = plan->segment_bytes;
    region->stride = round_up(bytes, PAGE_BYTES);
    region->instances = instances;
    plan->segment_bytes += region->stride * instances;
}

void plan_place_regions(struct plan *plan, const struct model_layout *layout)
{
    CHECK(plan->opt_workers <= OPT_WORKERS_MAX);
    plan->segment_bytes = 0;
    for (int r = 0; r < REGION_COUNT; r++)
        place(plan, &plan->regions[r], region_bytes(plan, layout, (enum region_id)r),
              topology_regions[r].per_worker ? plan->opt_workers : 1);
    for (int r = 0; r < RING_COUNT; r++) {
        uint64_t instances = topology_rings[r].per_worker ? plan->opt_workers : 1;
        CHECK((plan->ring_depth[r] & (plan->ring_depth[r] - 1)) ==
              0); /* a power of two; 0: not used */
        place(plan, &plan->ring_producers[r], ring_producer_bytes(plan->ring_depth[r]), instances);
        place(plan, &plan->ring_consumers[r], sizeof(struct ring_consumer_area), instances);
    }
}
