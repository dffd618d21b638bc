/* config -> layers -> tensors -> pages: alignment, page rule, parts, decay, look-up. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "model/layout.h"
#include "procs/error.h"

/* odd sizes, GQA, head_dim different from hidden / heads */
static struct model_config odd_config(uint32_t tied)
{
    return (struct model_config){
        .vocab_size = 257,
        .hidden_size = 48,
        .intermediate_size = 131,
        .n_layers = 3,
        .n_heads = 6,
        .n_kv_heads = 2,
        .head_dim = 10,
        .tie_word_embeddings = tied,
    };
}

static void layers_and_tensors_are_those_of_transformers(void **state)
{
    (void)state;
    static const char *const block[] = {
        "model.layers.1.self_attn.q_proj.weight",        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",           "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",           "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight"};
    static const uint64_t shapes[][2] = {{60, 48},  {20, 48},  {20, 48}, {48, 60}, {131, 48},
                                         {131, 48}, {48, 131}, {48, 1},  {48, 1}};
    struct model_config config = odd_config(0);
    struct model_layout layout;
    assert_int_equal(model_layout_init(&layout, &config, 8192), 0);
    assert_int_equal(layout.n_layers, 5);
    assert_int_equal(layout.n_tensors, 1 + 3 * 9 + 2);
    assert_int_equal(layout.layers[0].kind, LAYER_EMBEDDING);
    assert_int_equal(layout.layers[2].kind, LAYER_BLOCK);
    assert_int_equal(layout.layers[4].kind, LAYER_HEAD);
    for (uint32_t i = 0; i < 9; i++) {
        const struct model_tensor *t = &layout.tensors[layout.layers[2].first_tensor + i];
        assert_string_equal(t->name, block[i]);
        assert_int_equal(t->rows, shapes[i][0]);
        assert_int_equal(t->cols, shapes[i][1]);
        assert_int_equal(t->dims, i < 7 ? 2 : 1);
        assert_int_equal(t->layer, 2);
        assert_int_equal(t->elements, t->rows * t->cols);
    }
    assert_string_equal(layout.tensors[0].name, "model.embed_tokens.weight");
    assert_string_equal(layout.tensors[28].name, "model.norm.weight");
    assert_string_equal(layout.tensors[29].name, "lm_head.weight");
    uint64_t per_block = 60 * 48 * 2 + 20 * 48 * 2 + 131 * 48 * 3 + 96;
    assert_int_equal(layout.parameters, 2 * 257 * 48 + 3 * per_block + 48);
    model_layout_destroy(&layout);
}

static void a_tied_model_has_no_head_tensor(void **state)
{
    (void)state;
    struct model_config config = odd_config(1);
    struct model_layout layout;
    assert_int_equal(model_layout_init(&layout, &config, 4096), 0);
    assert_int_equal(layout.n_tensors, 29);
    assert_int_equal(layout.layers[4].n_tensors, 1);
    assert_int_equal(layout.layers[4].elements, 4096);
    assert_null(model_layout_find(&layout, "lm_head.weight"));
    assert_null(model_layer_tensor(&layout, 4, MODEL_HEAD));
    assert_non_null(model_layer_tensor(&layout, 4, MODEL_FINAL_NORM));
    model_layout_destroy(&layout);
}

/* Tensors: aligned, in order, without more padding than alignment asks for. */
static void check_tensors(const struct model_layout *layout)
{
    for (uint32_t l = 0; l < layout->n_layers; l++) {
        uint64_t next = 0;
        for (uint32_t i = 0; i < layout->layers[l].n_tensors; i++) {
            const struct model_tensor *t = &layout->tensors[layout->layers[l].first_tensor + i];
            assert_int_equal(t->offset, next);
            assert_int_equal(t->offset % 4096, 0);
            next = (t->offset + t->elements + 4095) / 4096 * 4096;
        }
        assert_int_equal(layout->layers[l].elements, next);
    }
}

/* Pages: every layer's elements once, in order, none across layers, only the last one short. */
static void check_pages(const struct model_layout *layout)
{
    uint64_t page = 0, elements = 0;
    for (uint32_t l = 0; l < layout->n_layers; l++) {
        uint64_t next = 0;
        assert_int_equal(layout->layers[l].first_page, page);
        for (uint32_t i = 0; i < layout->layers[l].n_pages; i++, page++) {
            const struct model_page *p = &layout->pages[page];
            assert_int_equal(p->layer, l);
            assert_int_equal(p->index, i);
            assert_int_equal(p->offset, next);
            if (i + 1 < layout->layers[l].n_pages)
                assert_int_equal(p->elements, layout->page_elements);
            assert_in_range(p->elements, 4096, layout->page_elements);
            assert_int_equal(p->elements % 4096, 0);
            next += p->elements;
        }
        assert_int_equal(next, layout->layers[l].elements);
        elements += next;
    }
    assert_int_equal(page, layout->n_pages);
    assert_int_equal(elements, layout->elements);
}

/* Parts: every element of every tensor once. */
static void check_parts(const struct model_layout *layout)
{
    uint64_t *next = calloc(layout->n_tensors, sizeof *next);
    uint64_t total = 0;
    assert_non_null(next);
    for (uint64_t i = 0; i < layout->n_pages; i++) {
        const struct model_page *page = &layout->pages[i];
        struct model_part parts[MODEL_LAYER_TENSORS_MAX];
        uint32_t n = model_page_parts(layout, page, parts);
        assert_in_range(n, 1, MODEL_LAYER_TENSORS_MAX);
        for (uint32_t k = 0; k < n; k++) {
            const struct model_tensor *t = &layout->tensors[parts[k].tensor];
            assert_int_equal(t->layer, page->layer);
            assert_int_equal(parts[k].tensor_start, next[parts[k].tensor]);
            assert_int_equal(t->offset + parts[k].tensor_start, page->offset + parts[k].page_start);
            assert_true(parts[k].page_start + parts[k].count <= page->elements);
            next[parts[k].tensor] += parts[k].count;
            total += parts[k].count;
        }
    }
    for (uint32_t i = 0; i < layout->n_tensors; i++)
        assert_int_equal(next[i], layout->tensors[i].elements);
    assert_int_equal(total, layout->parameters);
    free(next);
}

static void pages_cover_layers_and_parts_cover_tensors(void **state)
{
    (void)state;
    for (uint32_t tied = 0; tied < 2; tied++) {
        for (uint64_t page = 4096; page <= 65536; page *= 2) {
            struct model_config config = odd_config(tied);
            struct model_layout layout;
            assert_int_equal(model_layout_init(&layout, &config, page), 0);
            check_tensors(&layout);
            check_pages(&layout);
            check_parts(&layout);
            model_layout_destroy(&layout);
        }
    }
}

static void every_tensor_is_found_by_name(void **state)
{
    (void)state;
    struct model_config config = odd_config(0);
    struct model_layout layout;
    config.n_layers = 100;
    assert_int_equal(model_layout_init(&layout, &config, 4096), 0);
    for (uint32_t i = 0; i < layout.n_tensors; i++) {
        const struct model_tensor *t = &layout.tensors[i];
        assert_ptr_equal(model_layout_find(&layout, t->name), t);
        assert_ptr_equal(model_layer_tensor(&layout, t->layer, t->role), t);
    }
    assert_null(model_layout_find(&layout, "model.layers.100.self_attn.q_proj.weight"));
    assert_null(model_layout_find(&layout, ""));
    model_layout_destroy(&layout);
}

static void page_elements_out_of_rule_are_refused(void **state)
{
    (void)state;
    const uint64_t bad[] = {0, 1, 2048, 4095, 4097, 12288, (uint64_t)1 << 31, UINT64_MAX};
    struct model_config config = odd_config(0);
    struct model_layout layout;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(model_layout_init(&layout, &config, bad[i]), -ERROR_USER);
        assert_non_null(strstr(error_text(), "page_elements"));
    }
}

static void a_layer_of_too_many_pages_is_refused(void **state)
{
    (void)state;
    struct model_config config = odd_config(0);
    struct model_layout layout;
    config.vocab_size = config.hidden_size = 1 << 24;
    assert_int_equal(model_layout_init(&layout, &config, 4096), -ERROR_USER);
    assert_non_null(strstr(error_text(), "hint: choose a larger page_elements"));
}

static void vectors_and_matching_names_are_exempt_from_decay(void **state)
{
    (void)state;
    const char *const patterns[] = {"*.embed_tokens.weight", "model.layers.[01].mlp.*"};
    struct model_config config = odd_config(0);
    struct model_layout layout;
    assert_int_equal(model_layout_init(&layout, &config, 4096), 0);
    const struct {
        const char *name;
        int exempt, without_patterns;
    } cases[] = {
        {"model.embed_tokens.weight", 1, 0},
        {"model.layers.1.mlp.up_proj.weight", 1, 0},
        {"model.layers.2.mlp.up_proj.weight", 0, 0},
        {"model.layers.0.self_attn.q_proj.weight", 0, 0},
        {"model.layers.2.input_layernorm.weight", 1, 1},
        {"model.norm.weight", 1, 1},
        {"lm_head.weight", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct model_tensor *t = model_layout_find(&layout, cases[i].name);
        assert_int_equal(model_tensor_is_exempt(t, patterns, 2), cases[i].exempt);
        assert_int_equal(model_tensor_is_exempt(t, NULL, 0), cases[i].without_patterns);
    }
    model_layout_destroy(&layout);
}

static void decay_bits_say_for_each_block_what_its_tensor_says(void **state)
{
    (void)state;
    const char *const patterns[] = {"*.k_proj.weight", "*.down_proj.weight"};
    struct model_config config = odd_config(0);
    struct model_layout layout;
    assert_int_equal(model_layout_init(&layout, &config, 16384), 0);
    for (uint64_t p = 0; p < layout.n_pages; p++) {
        const struct model_page *page = &layout.pages[p];
        uint8_t bits[5] = {9, 9, 9, 9, 9};
        model_page_decay_bits(&layout, page, patterns, 2, bits);
        for (uint64_t b = 0; b < page->elements / 4096; b++) {
            const struct model_layer *layer = &layout.layers[page->layer];
            uint32_t t = layer->first_tensor;
            while (t + 1 < layer->first_tensor + layer->n_tensors &&
                   layout.tensors[t + 1].offset <= page->offset + b * 4096)
                t++;
            assert_int_equal(bits[b], !model_tensor_is_exempt(&layout.tensors[t], patterns, 2));
        }
        assert_int_equal(bits[page->elements / 4096], 9);
    }
    model_layout_destroy(&layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_and_tensors_are_those_of_transformers),
        cmocka_unit_test(a_tied_model_has_no_head_tensor),
        cmocka_unit_test(pages_cover_layers_and_parts_cover_tensors),
        cmocka_unit_test(every_tensor_is_found_by_name),
        cmocka_unit_test(page_elements_out_of_rule_are_refused),
        cmocka_unit_test(a_layer_of_too_many_pages_is_refused),
        cmocka_unit_test(vectors_and_matching_names_are_exempt_from_decay),
        cmocka_unit_test(decay_bits_say_for_each_block_what_its_tensor_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
