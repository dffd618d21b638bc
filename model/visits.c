#include "model/visits.h"

#include <stdlib.h>

#include "procs/check.h"
#include "procs/error.h"

static int visits_allocate(struct visits *visits, uint64_t n)
{
    *visits = (struct visits){0};
    visits->visits = calloc(n, sizeof *visits->visits);
    if (!visits->visits)
        return error_set(ERROR_FAILED, "no memory for %llu visits", (unsigned long long)n);
    return 0;
}

/* A visit that is lent its own layer's pages and publishes nothing. */
static struct visit *visits_add(struct visits *visits, enum visit_kind kind, uint32_t layer)
{
    struct visit *visit = &visits->visits[visits->n_visits++];
    *visit = (struct visit){.kind = kind, .layer = layer, .n_sources = 1, .sources = {layer, 0}};
    return visit;
}

static void add_head(struct visits *visits, const struct model_layout *layout)
{
    struct visit *head = visits_add(visits, VISIT_HEAD, layout->n_layers - 1);
    if (layout->config.tie_word_embeddings)
        head->sources[head->n_sources++] = 0;
    visits->n_forward = visits->n_visits;
}

static void count_pages(struct visits *visits, const struct model_layout *layout)
{
    for (uint64_t i = 0; i < visits->n_visits; i++)
        visits->n_pages += visit_n_pages(layout, &visits->visits[i]);
}

static struct visit *add_block(struct visits *visits, const struct model_layout *layout,
                               enum visit_kind kind, uint32_t block)
{
    struct visit *visit = visits_add(visits, kind, layout->blocks[block - 1]);
    visit->block = block;
    return visit;
}

static enum visit_keeps forward_keeps(uint32_t block, uint32_t checkpoint_every)
{
    if (checkpoint_every == VISITS_CHECKPOINT_NONE)
        return VISIT_KEEPS_ALL;
    return (block - 1) % checkpoint_every == 0 ? VISIT_KEEPS_INPUT : VISIT_KEEPS_NOTHING;
}

/* Blocks first..last, one group: forward again unless what backward needs is there, then back. */
static void add_backward_group(struct visits *visits, const struct model_layout *layout,
                               uint32_t first, uint32_t last, uint32_t checkpoint_every)
{
    if (checkpoint_every > VISITS_CHECKPOINT_FULL)
        for (uint32_t block = first; block <= last; block++)
            add_block(visits, layout, VISIT_REFORWARD, block)->keeps = VISIT_KEEPS_ALL;
    for (uint32_t block = last; block >= first; block--)
        add_block(visits, layout, VISIT_BACKWARD, block)->publishes = 1;
}

int visits_init(struct visits *visits, const struct model_layout *layout, uint32_t checkpoint_every)
{
    uint32_t n_blocks = (uint32_t)layout->config.n_layers;
    int rc = visits_allocate(visits, 3 * (uint64_t)n_blocks + 3);
    if (rc < 0)
        return rc;
    visits_add(visits, VISIT_FORWARD, 0);
    for (uint32_t block = 1; block <= n_blocks; block++)
        add_block(visits, layout, VISIT_FORWARD, block)->keeps =
            forward_keeps(block, checkpoint_every);
    add_head(visits, layout);
    visits->visits[visits->n_visits - 1].publishes = 1;

    uint32_t group = checkpoint_every == VISITS_CHECKPOINT_NONE ? n_blocks : checkpoint_every;
    for (uint32_t last = n_blocks; last >= 1;) {
        uint32_t first = last - (last - 1) % group;
        add_backward_group(visits, layout, first, last, checkpoint_every);
        last = first - 1;
    }
    struct visit *embedding = visits_add(visits, VISIT_EMBEDDING_BACKWARD, 0);
    embedding->n_sources = 0;
    embedding->publishes = 1;
    count_pages(visits, layout);
    return 0;
}

int visits_forward_only(struct visits *visits, const struct model_layout *layout)
{
    uint32_t n_blocks = (uint32_t)layout->config.n_layers;
    int rc = visits_allocate(visits, (uint64_t)n_blocks + 2);
    if (rc < 0)
        return rc;
    visits_add(visits, VISIT_FORWARD, 0);
    for (uint32_t block = 1; block <= n_blocks; block++)
        add_block(visits, layout, VISIT_FORWARD, block);
    add_head(visits, layout);
    count_pages(visits, layout);
    return 0;
}

void visits_destroy(struct visits *visits)
{
    free(visits->visits);
    *visits = (struct visits){0};
}

uint64_t visit_n_pages(const struct model_layout *layout, const struct visit *visit)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < visit->n_sources; i++)
        n += model_group_pages(layout, visit->sources[i]);
    return n;
}

uint64_t visit_page(const struct model_layout *layout, const struct visit *visit, uint64_t k)
{
    for (uint32_t i = 0; i < visit->n_sources; i++) {
        uint64_t n = model_group_pages(layout, visit->sources[i]);
        if (k < n)
            return layout->layers[visit->sources[i]].first_page + k;
        k -= n;
    }
    CHECK(!"k is a page of the visit");
    return 0;
}

const char *visit_kind_name(enum visit_kind kind)
{
    static const char *const names[] = {
        [VISIT_FORWARD] = "forward",
        [VISIT_REFORWARD] = "reforward",
        [VISIT_HEAD] = "head",
        [VISIT_BACKWARD] = "backward",
        [VISIT_EMBEDDING_BACKWARD] = "embedding_backward",
    };
    CHECK(kind <= VISIT_EMBEDDING_BACKWARD);
    return names[kind];
}
