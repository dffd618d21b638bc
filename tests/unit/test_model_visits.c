/* The visiting order, spelled out for each activation checkpointing mode. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "model/visits.h"
#include "procs/error.h"

static void make_layout(struct model_layout *layout, uint64_t n_layers, uint32_t tied)
{
    struct model_config config = {
        .vocab_size = 300,
        .hidden_size = 48,
        .intermediate_size = 96,
        .n_layers = n_layers,
        .n_heads = 4,
        .n_kv_heads = 2,
        .head_dim = 12,
        .tie_word_embeddings = tied,
    };
    assert_int_equal(model_layout_init(layout, &config, 4096), 0);
}

/*
 * "F1i" = forward of layer 1 that keeps its input; F forward, R reforward, H head, B backward,
 * E embedding backward; i keeps input, a keeps all; ! publishes.
 */
static void spell(const struct visits *visits, char *text, size_t bytes)
{
    size_t used = 0;
    for (uint64_t i = 0; i < visits->n_visits; i++) {
        const struct visit *v = &visits->visits[i];
        used += (size_t)snprintf(
            text + used, bytes - used, "%s%c%u%s%s", i ? " " : "", "FRHBE" [v->kind], v -> layer,
            (const char *[]) { "", "i", "a" }[v->keeps], v->publishes ? "!" : "");
        assert_true(used < bytes);
    }
}

static void check_order(uint64_t n_layers, uint32_t every, const char *expected)
{
    struct model_layout layout;
    struct visits visits;
    char text[512];
    make_layout(&layout, n_layers, 0);
    assert_int_equal(visits_init(&visits, &layout, every), 0);
    spell(&visits, text, sizeof text);
    assert_string_equal(text, expected);
    visits_destroy(&visits);
    model_layout_destroy(&layout);
}

static void full_checkpointing_recomputes_inside_the_backward_visit(void **state)
{
    (void)state;
    check_order(3, VISITS_CHECKPOINT_FULL, "F0 F1i F2i F3i H4! B3! B2! B1! E0!");
    check_order(1, VISITS_CHECKPOINT_FULL, "F0 F1i H2! B1! E0!");
}

static void no_checkpointing_keeps_everything(void **state)
{
    (void)state;
    check_order(3, VISITS_CHECKPOINT_NONE, "F0 F1a F2a F3a H4! B3! B2! B1! E0!");
}

static void groups_go_forward_again_and_then_back(void **state)
{
    (void)state;
    check_order(4, 2, "F0 F1i F2 F3i F4 H5! R3a R4a B4! B3! R1a R2a B2! B1! E0!");
    check_order(5, 2, "F0 F1i F2 F3i F4 F5i H6! R5a B5! R3a R4a B4! B3! R1a R2a B2! B1! E0!");
    check_order(3, 8, "F0 F1i F2 F3 H4! R1a R2a R3a B3! B2! B1! E0!");
}

static void evaluation_ends_with_the_head_and_publishes_nothing(void **state)
{
    (void)state;
    struct model_layout layout;
    struct visits visits;
    char text[512];
    make_layout(&layout, 3, 1);
    assert_int_equal(visits_forward_only(&visits, &layout), 0);
    spell(&visits, text, sizeof text);
    assert_string_equal(text, "F0 F1 F2 F3 H4");
    assert_int_equal(visits.n_forward, 5);
    assert_int_equal(visits.visits[4].n_sources, 2);
    visits_destroy(&visits);
    model_layout_destroy(&layout);
}

static void a_tied_head_is_lent_its_norm_and_then_the_embedding(void **state)
{
    (void)state;
    struct model_layout layout;
    struct visits visits;
    make_layout(&layout, 2, 1);
    assert_int_equal(visits_init(&visits, &layout, 1), 0);
    const struct visit *head = &visits.visits[visits.n_forward - 1];
    assert_int_equal(head->kind, VISIT_HEAD);
    assert_int_equal(head->n_sources, 2);
    assert_int_equal(head->sources[0], 3);
    assert_int_equal(head->sources[1], 0);
    assert_int_equal(layout.layers[3].n_pages, 1);
    assert_int_equal(layout.layers[0].n_pages, 4); /* 300 x 48 = 14400 elements */
    assert_int_equal(visit_n_pages(&layout, head), 5);
    assert_int_equal(visit_page(&layout, head, 0), layout.layers[3].first_page);
    for (uint64_t k = 0; k < 4; k++)
        assert_int_equal(visit_page(&layout, head, 1 + k), k);
    visits_destroy(&visits);
    model_layout_destroy(&layout);
}

/* Blocks 0 and 2 have two experts each: layers 1 2 3, 4, 5 6 7. */
static void make_sparse(struct model_layout *layout)
{
    struct model_config config = {
        .vocab_size = 300,
        .hidden_size = 48,
        .intermediate_size = 96,
        .n_layers = 3,
        .n_heads = 4,
        .n_kv_heads = 2,
        .head_dim = 12,
        .n_experts = 2,
        .experts_per_token = 1,
        .expert_size = 100,
        .sparse = {5},
    };
    assert_int_equal(model_layout_init(layout, &config, 4096), 0);
}

static void experts_are_visited_with_their_block(void **state)
{
    (void)state;
    struct model_layout layout;
    struct visits visits;
    char text[512];
    make_sparse(&layout);
    assert_int_equal(layout.n_layers, 9);
    assert_int_equal(visits_init(&visits, &layout, 2), 0);
    spell(&visits, text, sizeof text);
    assert_string_equal(text, "F0 F1i F4 F5i H8! R5a B5! R1a R4a B4! B1! E0!");
    const struct visit *first = &visits.visits[1], *second = &visits.visits[2];
    assert_true(first->block == 1 && second->block == 2 && visits.visits[3].block == 3);
    uint64_t own = layout.layers[1].n_pages, each = layout.layers[2].n_pages;
    assert_int_equal(each, 6); /* three matrices of 4800 elements, each two blocks of 4096 */
    assert_int_equal(visit_n_pages(&layout, first), own + 2 * each);
    assert_int_equal(visit_n_pages(&layout, second), layout.layers[4].n_pages);
    for (uint64_t k = 0; k < own + 2 * each; k++)
        assert_int_equal(visit_page(&layout, first, k), layout.layers[1].first_page + k);
    assert_int_equal(visits.n_pages, 2 * (layout.n_pages - layout.layers[0].n_pages) +
                                         layout.layers[0].n_pages - layout.layers[8].n_pages +
                                         layout.n_pages - layout.layers[0].n_pages -
                                         layout.layers[8].n_pages);
    visits_destroy(&visits);
    assert_int_equal(visits_forward_only(&visits, &layout), 0);
    spell(&visits, text, sizeof text);
    assert_string_equal(text, "F0 F1 F4 F5 H8");
    visits_destroy(&visits);
    model_layout_destroy(&layout);
}

static void every_layer_publishes_once_and_the_embedding_last(void **state)
{
    (void)state;
    for (uint32_t every = 0; every < 5; every++) {
        struct model_layout layout;
        struct visits visits;
        int published[9] = {0};
        uint64_t pages = 0;
        make_layout(&layout, 7, every % 2);
        assert_int_equal(visits_init(&visits, &layout, every), 0);
        for (uint64_t i = 0; i < visits.n_visits; i++) {
            published[visits.visits[i].layer] += (int)visits.visits[i].publishes;
            pages += visit_n_pages(&layout, &visits.visits[i]);
        }
        for (int l = 0; l < 9; l++)
            assert_int_equal(published[l], 1);
        const struct visit *last = &visits.visits[visits.n_visits - 1];
        assert_int_equal(last->kind, VISIT_EMBEDDING_BACKWARD);
        assert_int_equal(last->n_sources, 0);
        assert_int_equal(visits.n_pages, pages);
        visits_destroy(&visits);
        model_layout_destroy(&layout);
    }
}

static void kinds_have_names(void **state)
{
    (void)state;
    assert_string_equal(visit_kind_name(VISIT_FORWARD), "forward");
    assert_string_equal(visit_kind_name(VISIT_EMBEDDING_BACKWARD), "embedding_backward");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_checkpointing_recomputes_inside_the_backward_visit),
        cmocka_unit_test(no_checkpointing_keeps_everything),
        cmocka_unit_test(groups_go_forward_again_and_then_back),
        cmocka_unit_test(evaluation_ends_with_the_head_and_publishes_nothing),
        cmocka_unit_test(a_tied_head_is_lent_its_norm_and_then_the_embedding),
        cmocka_unit_test(experts_are_visited_with_their_block),
        cmocka_unit_test(every_layer_publishes_once_and_the_embedding_last),
        cmocka_unit_test(kinds_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
