/*
 * The page table in shared memory, as a commit takes it: entries are damaged, some with their hash
 * made right again, and committed to a small store (commit_begin() and what follows).
 *
 *     | which store | flags | changes ... |
 *
 * A table is refused, or what was committed is found again, entry for entry, by the code that
 * recovers: nothing is made durable that the next start would not believe.
 */
#include "tests/fuzz/store_image.h"

enum { HEAD_BYTES = 2, FLAG_SEAL = 1 };

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    images_make();
    return 0;
}

static void change(struct fuzz_input *in, struct page_entry *table, uint64_t n)
{
    struct fuzz_op op;
    for (int i = 0; i < FUZZ_OPS_MAX && fuzz_next_op(in, &op); i++)
        fuzz_op_write(&op, table, n * sizeof *table, op.at % (n * sizeof *table));
}

/* What an entry of this store may say, by the rule once more. */
static void entries_are_possible(const struct image *image, const struct page_entry *table)
{
    const struct model_layout *layout = &image->f.layout;
    for (uint64_t i = 0; i < layout->n_pages; i++) {
        const struct page_entry *e = &table[i];
        uint64_t n = layout->pages[i].elements, moments = e->codec == PAGE_ZERO ? 0 : 4 * n;
        int split = image->f.options.dtype == DTYPE_BFLOAT16;
        REQUIRE(e->page == i && e->layer == layout->pages[i].layer && e->slot < 3);
        REQUIRE(e->codec == PAGE_ZERO || e->codec == PAGE_RAW);
        REQUIRE(e->length[PART_WEIGHTS] == (split ? 2 : 4) * n);
        REQUIRE(e->length[PART_RESIDUAL] == (split ? 2 : 0) * n);
        REQUIRE(e->length[PART_M] == moments && e->length[PART_V] == moments);
    }
}

static void commit(struct image *image, struct store *store, const struct page_entry *table)
{
    struct commit_record made, found;
    struct page_entry again[PAGES_MAX];
    struct commit *c;
    struct commit_facts facts = fixture_facts(COMMITS);
    REQUIRE(commit_open(&c, store) == 0);
    commit_resume(c, &image->records[COMMITS - 1]);
    error_clear();
    int rc = commit_run(c, &facts, table, &made);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_FAILED);
        REQUIRE(commit_phase_now(c) == COMMIT_IDLE); /* before anything was written */
        image_is_untouched(image);
    } else {
        entries_are_possible(image, table);
        REQUIRE(store_newest(store, &found, again) == 0);
        REQUIRE(memcmp(&made, &found, sizeof made) == 0);
        REQUIRE(made.sequence == COMMITS && made.facts.step == COMMITS);
        REQUIRE(memcmp(again, table, image_pages(image) * sizeof *table) == 0);
    }
    commit_close(c);
}

/* What a commit wrote is taken back: its table place and its record. */
static void undo(struct image *image)
{
    image_touch(image, image_table(image, COMMITS));
    image_touch(image, image_record(image, COMMITS));
    image_restore(image);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size}, none = {data, 0};
    struct image *image = &images[fuzz_u8(&in) % STORES];
    const uint64_t n = image_pages(image);
    struct page_entry *table = malloc(n * sizeof *table); /* a step outside is seen */
    struct store *store;
    REQUIRE(table != NULL);
    memcpy(table, image->tables[COMMITS - 1], n * sizeof *table);
    uint8_t flags = fuzz_u8(&in);
    change(&in, table, n);
    for (uint64_t i = 0; i < n && flags & FLAG_SEAL; i++)
        page_entry_seal(&table[i]);
    image_damage(image, &none);
    REQUIRE(store_open(&store, &image->f.options) == 0);
    commit(image, store, table);
    store_close(store);
    undo(image);
    free(table);
    return 0;
}

#define ENTRY(i, field, bytes)                                                                     \
    {                                                                                              \
        0, (i) * sizeof(struct page_entry) + offsetof(struct page_entry, field), bytes             \
    }
#define ENTRIES(field, bytes) ENTRY(0, field, bytes), ENTRY(1, field, bytes), ENTRY(3, field, bytes)

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const struct fuzz_place places[] = {
        ENTRIES(page, 8),   ENTRIES(version, 8),    ENTRIES(layer, 4),
        ENTRIES(slot, 4),   ENTRIES(codec, 4),      ENTRIES(length, 8),
        ENTRIES(digest, 8), ENTRIES(entry_hash, 4), ENTRIES(length[2], 8),
    };
    uint64_t random = seed;
    size = fuzz_mutate_ops(data, size, max_size, HEAD_BYTES, &random, places,
                           sizeof places / sizeof places[0]);
    if (size >= HEAD_BYTES && fuzz_below(&random, 4) != 0)
        data[1] |= FLAG_SEAL;
    return size;
}
