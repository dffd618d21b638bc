/*
 * A small model's store in temporary directories, and a driver that does with it what io_worker
 * does in a step: read every page of the newest commit back, write the next version into a slot
 * that the rule allows, commit. The content of a page is a pure function of (layer, offset,
 * version), so that what recovery finds can be compared with what must have been there.
 */
#ifndef TESTS_IO_STORE_FIXTURE_H
#define TESTS_IO_STORE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "io_worker/slots.h"
#include "io_worker/store.h"
#include "io_worker/store_internal.h"
#include "model/split.h"
#include "procs/check.h"
#include "procs/error.h"
#include "tests/io/lying_engine.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIXTURE_DIRECTORIES_MAX = 2, FIXTURE_DEPTH = 8 };

struct fixture {
    struct model_layout layout;
    char root[64];
    char paths[FIXTURE_DIRECTORIES_MAX][80];
    const char *directories[FIXTURE_DIRECTORIES_MAX];
    struct store_options options;

    struct store *store;
    struct commit *commit;
    struct page_entry *committed, *anchor, *forming; /* tables, n_pages each */
    struct commit_record record;                     /* the newest that was acknowledged */
    struct readback readback;
    unsigned char *image;
    float *values;
    uint64_t step;
};

static inline struct model_config fixture_config(void)
{
    struct model_config config = {
        .vocab_size = 300,
        .hidden_size = 32,
        .intermediate_size = 160,
        .n_layers = 2,
        .n_heads = 4,
        .n_kv_heads = 2,
        .head_dim = 8,
        .max_position = 64,
        .norm_eps = 1e-5,
        .rope = {{.theta = 10000, .factor = 1}, {.theta = 10000, .factor = 1}},
        .initializer_range = 0.02,
        .tie_word_embeddings = 1,
        .bos_token_id = -1,
        .pad_token_id = -1};
    return config;
}

static inline void fixture_init_model(struct fixture *f, const struct model_config *config,
                                      enum dtype_mode dtype, uint64_t page_elements,
                                      unsigned n_directories, const char *where)
{
    memset(f, 0, sizeof *f);
    assert_int_equal(model_layout_init(&f->layout, config, page_elements), 0);
    (void)snprintf(f->root, sizeof f->root, "%s/mt-store-XXXXXX", where);
    assert_non_null(mkdtemp(f->root));
    for (unsigned d = 0; d < n_directories; d++) {
        (void)snprintf(f->paths[d], sizeof f->paths[d], "%s/%u", f->root, d);
        f->directories[d] = f->paths[d];
    }
    f->options = (struct store_options){.directories = f->directories,
                                        .n_directories = n_directories,
                                        .run = {0xab, 0xcd, 3},
                                        .model = "llama 2x32",
                                        .layout = &f->layout,
                                        .dtype = dtype,
                                        .slots_per_page = 3,
                                        .engine = ENGINE_AUTO,
                                        .engine_depth = FIXTURE_DEPTH,
                                        .lock_timeout_s = 1};
    for (unsigned d = 0; d < n_directories; d++)
        f->options.stripe_weights[d] = 1;
    const uint64_t n = f->layout.n_pages;
    f->committed = calloc(n, sizeof f->committed[0]);
    f->anchor = calloc(n, sizeof f->anchor[0]);
    f->forming = calloc(n, sizeof f->forming[0]);
    f->readback.bits = calloc(readback_words(n), sizeof(uint64_t));
    f->readback.n_pages = n;
    struct page_image_layout image;
    page_image_layout(&image, dtype, page_elements);
    assert_int_equal(posix_memalign((void **)&f->image, 4096, image.bytes), 0);
    f->values = calloc(page_elements, sizeof f->values[0]);
}

static inline void fixture_init_in(struct fixture *f, enum dtype_mode dtype, uint64_t page_elements,
                                   unsigned n_directories, const char *where)
{
    struct model_config config = fixture_config();
    fixture_init_model(f, &config, dtype, page_elements, n_directories, where);
}

static inline void fixture_init(struct fixture *f, enum dtype_mode dtype, uint64_t page_elements,
                                unsigned n_directories)
{
    fixture_init_in(f, dtype, page_elements, n_directories, "/tmp");
}

static inline void fixture_close_store(struct fixture *f)
{
    commit_close(f->commit);
    store_close(f->store);
    f->commit = NULL;
    f->store = NULL;
}

static inline void fixture_destroy(struct fixture *f)
{
    char command[128];
    fixture_close_store(f);
    (void)snprintf(command, sizeof command, "rm -rf '%s'", f->root);
    assert_int_equal(system(command), 0);
    free(f->committed);
    free(f->anchor);
    free(f->forming);
    free(f->readback.bits);
    free(f->image);
    free(f->values);
    model_layout_destroy(&f->layout);
}

static inline float fixture_value(uint64_t layer, uint64_t offset, uint64_t version, uint64_t part)
{
    uint64_t x = (layer * 1000003 + offset) * 2654435761u + version * 40503 + part * 977;
    x ^= x >> 17;
    x *= 0x9E3779B97F4A7C15ull;
    return (float)(int32_t)(x >> 32) * 1e-9f;
}

/* Real parameters only; padding stays zero. */
static inline void fixture_fill(struct fixture *f, uint64_t page, uint64_t version, uint64_t part)
{
    const struct model_page *p = &f->layout.pages[page];
    struct model_part parts[MODEL_LAYER_TENSORS_MAX];
    uint32_t n = model_page_parts(&f->layout, p, parts);
    memset(f->values, 0, p->elements * sizeof f->values[0]);
    for (uint32_t i = 0; i < n; i++)
        for (uint64_t e = 0; e < parts[i].count; e++) {
            uint64_t at = parts[i].page_start + e;
            f->values[at] = fixture_value(p->layer, p->offset + at, version, part);
        }
}

/* The sealed image of (page, version) in f->image; its bytes. */
static inline uint64_t fixture_make_image(struct fixture *f, uint64_t page, uint64_t version)
{
    struct page_image_layout layout;
    struct page_identity identity = {.page = page, .version = version};
    memcpy(identity.run, f->options.run, sizeof identity.run);
    identity.layer = f->layout.pages[page].layer;
    page_image_layout(&layout, f->options.dtype, f->layout.pages[page].elements);
    const enum page_codec codec = version == 0 ? PAGE_ZERO : PAGE_RAW;
    fixture_fill(f, page, version, PART_WEIGHTS);
    if (f->options.dtype == DTYPE_BFLOAT16)
        split_master(f->values, layout.elements, page_image_part(f->image, &layout, PART_WEIGHTS),
                     page_image_part(f->image, &layout, PART_RESIDUAL));
    else
        memcpy(page_image_part(f->image, &layout, PART_WEIGHTS), f->values,
               layout.capacity[PART_WEIGHTS]);
    for (enum page_part part = PART_M; part <= PART_V && codec == PAGE_RAW; part++) {
        fixture_fill(f, page, version, part);
        memcpy(page_image_part(f->image, &layout, part), f->values, layout.capacity[part]);
    }
    page_image_seal(f->image, &layout, &identity, codec);
    return page_image_bytes(&layout, codec);
}

static inline struct commit_facts fixture_facts(uint64_t step)
{
    struct commit_facts facts = {.step = step,
                                 .optimizer_step = step,
                                 .seed = 42,
                                 .data_position = {step * 8, 1},
                                 .loss = 3.5 - 0.01 * (double)step,
                                 .norm = 1.25,
                                 .learning_rate = 1e-4,
                                 .spike_count = 1,
                                 .spike_loss = {3.25},
                                 .spike_norm = {1.5},
                                 .lineage = "test"};
    return facts;
}

/* Writes version `version` of a page into `slot` and notes it in the forming table. */
static inline int fixture_write(struct fixture *f, uint64_t page, uint64_t version, uint32_t slot)
{
    struct io_request request = {.buffer = f->image};
    request.bytes = fixture_make_image(f, page, version);
    store_request_page(f->store, &request, IO_WRITE, page, slot);
    page_entry_from_image(&f->forming[page], f->image, slot);
    return engine_run(store_engine(f->store), &request);
}

static inline int fixture_read_back(struct fixture *f, uint64_t page)
{
    const struct page_entry *entry = &f->committed[page];
    struct page_image_layout layout;
    store_page_layout(f->store, page, &layout);
    struct io_request request = {.buffer = f->image,
                                 .bytes = page_image_bytes(&layout, entry->codec)};
    store_request_page(f->store, &request, IO_READ, page, entry->slot);
    int rc = engine_run(store_engine(f->store), &request);
    if (rc == 0)
        rc = store_verify_image(f->store, entry, f->image);
    if (rc == 0 && readback_mark(&f->readback, f->record.sequence, page))
        memcpy(f->anchor, f->committed, f->layout.n_pages * sizeof f->anchor[0]);
    return rc;
}

static inline void fixture_acknowledge(struct fixture *f)
{
    memcpy(f->committed, f->forming, f->layout.n_pages * sizeof f->committed[0]);
    f->step = f->record.facts.step;
    readback_begin(&f->readback, f->record.sequence);
}

/* Version 0 of all pages and commit record 0; READY. */
static inline int fixture_import(struct fixture *f)
{
    for (uint64_t page = 0; page < f->layout.n_pages; page++)
        if (fixture_write(f, page, 0, 0) < 0)
            return -1;
    struct commit_facts facts = fixture_facts(0);
    if (commit_run(f->commit, &facts, f->forming, &f->record) < 0)
        return -1;
    fixture_acknowledge(f);
    memcpy(f->anchor, f->committed, f->layout.n_pages * sizeof f->anchor[0]);
    return 0;
}

static inline void fixture_create(struct fixture *f)
{
    assert_int_equal(store_open(&f->store, &f->options), 0);
    assert_int_not_equal(store_state_now(f->store), STORE_READY);
    if (store_create(f->store) < 0)
        fail_msg("%s", error_text());
    assert_int_equal(commit_open(&f->commit, f->store), 0);
    assert_int_equal(fixture_import(f), 0);
    assert_int_equal(store_mark_ready(f->store), 0);
}

/* One step, all pages, as the streaming apply does it: read back, then write. -1 with error_text().
 */
static inline int fixture_step(struct fixture *f)
{
    const uint64_t step = f->step + 1;
    for (uint64_t page = 0; page < f->layout.n_pages; page++) {
        if (fixture_read_back(f, page) < 0)
            return -1;
        struct slot_holders holders = {.anchor = f->anchor[page].slot,
                                       .committed = f->committed[page].slot,
                                       .committing = SLOT_NONE,
                                       .complete = f->committed[page].slot,
                                       .forming = SLOT_NONE};
        uint32_t slot = slots_choose(&holders, f->options.slots_per_page);
        CHECK(slot != SLOT_NONE);
        if (fixture_write(f, page, step, slot) < 0)
            return -1;
    }
    struct commit_facts facts = fixture_facts(step);
    if (commit_run(f->commit, &facts, f->forming, &f->record) < 0)
        return -1;
    fixture_acknowledge(f);
    return 0;
}

static inline void fixture_steps(struct fixture *f, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (fixture_step(f) < 0)
            fail_msg("%s", error_text());
}

/* Closes, opens anew and recovers, as a start after a crash does. 0 or negative. */
static inline int fixture_recover(struct fixture *f, uint64_t *fell_back)
{
    fixture_close_store(f);
    if (store_open(&f->store, &f->options) < 0)
        return -1;
    assert_int_equal(store_state_now(f->store), STORE_READY);
    assert_int_equal(commit_open(&f->commit, f->store), 0);
    int rc = store_recover(f->store, &f->record, f->forming, fell_back);
    if (rc < 0)
        return rc;
    commit_resume(f->commit, &f->record);
    fixture_acknowledge(f);
    memcpy(f->anchor, f->committed, f->layout.n_pages * sizeof f->anchor[0]);
    return 0;
}

/* The digests that (page, version) must have, whatever is on disk. */
static inline int fixture_table_is_of_step(struct fixture *f, uint64_t step)
{
    for (uint64_t page = 0; page < f->layout.n_pages; page++) {
        struct page_entry expected;
        (void)fixture_make_image(f, page, step);
        page_entry_from_image(&expected, f->image, f->committed[page].slot);
        if (memcmp(&expected, &f->committed[page], sizeof expected) != 0)
            return 0;
    }
    return 1;
}

/* Puts the lying engine under the store. */
static inline void fixture_lie(struct fixture *f, struct liar *liar)
{
    struct engine_file files[STORE_DIRECTORIES_MAX + 1];
    unsigned n = store_directory_count(f->store) + 1;
    for (unsigned i = 0; i < n; i++)
        files[i] = (struct engine_file){-1, store_file_path(f->store, i), SECTOR_BYTES};
    liar->durable_files = 1u << (n - 1); /* the commit file is O_DSYNC */
    struct engine_options options = {.depth = FIXTURE_DEPTH, .files = files, .n_files = n};
    engine_close(f->store->engine);
    f->store->engine = NULL;
    assert_int_equal(liar_open(&f->store->engine, &options, liar), 0);
}

static inline void fixture_flip(const char *path, uint64_t offset)
{
    unsigned char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(close(fd), 0);
}

#endif
