/*
 * Recovery: a small store with three commits is damaged anywhere (records, tables, slots,
 * superblocks; torn, stale, misdirected, cut, with checksums made right again) and opened, verified
 * and recovered (store_open, store_newest, store_recover, store_verify).
 *
 *     | which store | changes ... |
 *
 * Whatever is recovered holds together down to the last byte. Unless checksums were forged it is
 * the newest commit or the one before, exactly as made; and damage that the newest commit does not
 * depend on must not keep it from being recovered. No file is ever changed.
 */
#include "tests/fuzz/store_image.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    images_make();
    return 0;
}

/* What the newest commit depends on: its record, its table, the slots that it names. */
static unsigned newest_parts(const struct image *image, struct stretch parts[PAGES_MAX + 2])
{
    const struct commit_record *newest = &image->records[COMMITS - 1];
    unsigned n = 0;
    parts[n++] = image_record(image, (unsigned)newest->sequence);
    parts[n++] = image_table(image, newest->table_place);
    for (uint64_t page = 0; page < image_pages(image); page++)
        parts[n++] = image_slot(image, (unsigned)page * 3 + image->tables[COMMITS - 1][page].slot);
    return n;
}

static int is_part_of_newest(const struct image *image, unsigned file, uint64_t offset,
                             uint64_t bytes)
{
    struct stretch parts[PAGES_MAX + 2];
    unsigned n = newest_parts(image, parts);
    for (unsigned i = 0; i < n; i++)
        if (parts[i].file == file && offset < parts[i].offset + parts[i].bytes &&
            parts[i].offset < offset + bytes)
            return 1;
    return 0;
}

/* Is any byte of it another than was written? */
static int newest_differs(const struct image *image)
{
    struct stretch parts[PAGES_MAX + 2];
    unsigned n = newest_parts(image, parts);
    for (unsigned i = 0; i < n; i++) {
        const struct image_file *file = &image->files[parts[i].file];
        if (memcmp(file->now + parts[i].offset, file->base + parts[i].offset, parts[i].bytes) != 0)
            return 1;
    }
    return 0;
}

static int newest_is_whole(const struct image *image)
{
    for (unsigned i = 0; i < image->n_files; i++)
        if (image->files[i].bytes != image->files[i].base_bytes)
            return 0;
    for (unsigned i = 0; i < image->n_touched; i++)
        if (is_part_of_newest(image, image->touched[i].file, image->touched[i].offset,
                              image->touched[i].bytes))
            return 0;
    return 1;
}

static void table_holds(struct image *image, struct store *store,
                        const struct commit_record *record, const struct page_entry *table)
{
    const struct model_layout *layout = &image->f.layout;
    struct page_digest state = commit_state_hash(&record->facts, table, layout->n_pages);
    REQUIRE(commit_record_verify(record, image->f.options.run, store_uuid(store)) == 0);
    REQUIRE(page_digest_equal(state, record->state_hash));
    for (uint64_t i = 0; i < layout->n_pages; i++) {
        const struct page_entry *entry = &table[i];
        REQUIRE(page_entry_valid(entry) && entry->page == i && entry->slot < 3);
        REQUIRE(entry->layer == layout->pages[i].layer);
        REQUIRE(entry->codec == PAGE_ZERO || entry->codec == PAGE_RAW);
    }
}

static void slots_hold(struct image *image, struct store *store, const struct page_entry *table)
{
    for (uint64_t i = 0; i < image_pages(image); i++) {
        struct stretch slot = image_slot(image, (unsigned)i * 3 + table[i].slot);
        const uint8_t *bytes = image_at(image, slot);
        struct page_image_header header;
        memcpy(&header, bytes, sizeof header);
        REQUIRE(store_verify_image(store, &table[i], bytes) == 0);
        REQUIRE(memcmp(header.length, table[i].length, sizeof header.length) == 0);
        REQUIRE(header.codec == table[i].codec);
    }
}

static void is_genuine(const struct image *image, const struct commit_record *record,
                       const struct page_entry *table)
{
    const uint64_t n = record->sequence;
    REQUIRE(n == COMMITS - 1 || n == COMMITS - 2);
    REQUIRE(memcmp(record, &image->records[n], sizeof *record) == 0);
    REQUIRE(memcmp(table, image->tables[n], image_pages(image) * sizeof *table) == 0);
}

/* The valid record with the largest sequence, by the rule once more. */
static int newest_record_of(struct image *image, const uint8_t uuid[RUN_UUID_BYTES],
                            struct commit_record *newest)
{
    int found = 0;
    memset(newest, 0, sizeof *newest);
    for (unsigned i = 0; i < COMMIT_RECORD_RING; i++) {
        struct commit_record record;
        memcpy(&record, image_at(image, image_record(image, i)), sizeof record);
        if (commit_record_verify(&record, image->f.options.run, uuid) < 0 ||
            record.sequence % COMMIT_RECORD_RING != i ||
            (found && record.sequence <= newest->sequence))
            continue;
        *newest = record;
        found = 1;
    }
    return found;
}

/* Forged or not, what is recovered is the newest valid record or the one that it names its parent.
 */
static void is_newest_or_parent(struct image *image, struct store *store,
                                const struct commit_record *recovered, uint64_t fell_back)
{
    struct commit_record newest;
    REQUIRE(newest_record_of(image, store_uuid(store), &newest));
    if (memcmp(&newest, recovered, sizeof newest) == 0) {
        REQUIRE(fell_back == 0);
        return;
    }
    REQUIRE(fell_back == newest.sequence && recovered->sequence + 1 == newest.sequence);
    REQUIRE(page_digest_equal(page_image_digest(recovered, sizeof *recovered), newest.parent));
}

static void count_damage(void *context, const char *file, uint64_t offset, const char *text)
{
    REQUIRE(file[0] == '/' && text[0] != '\0' && offset < (uint64_t)64 << 20);
    ++*(unsigned *)context;
}

static void recover(struct image *image, struct store *store)
{
    struct commit_record newest, recovered, verified;
    struct page_entry newest_table[PAGES_MAX], table[PAGES_MAX], verified_table[PAGES_MAX];
    struct page_digest weights;
    uint64_t fell_back = 0;
    unsigned damages = 0;
    error_clear();
    int newest_rc = store_newest(store, &newest, newest_table);
    if (newest_rc < 0)
        fuzz_refused(newest_rc, FUZZ_FAILED);
    error_clear();
    int rc = store_recover(store, &recovered, table, &fell_back);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_FAILED);
        REQUIRE(strstr(error_text(), image->f.root) != NULL);
    }
    error_clear();
    int whole = store_verify(store, &verified, verified_table, count_damage, &damages);
    if (whole < 0)
        fuzz_refused(whole, FUZZ_FAILED);
    REQUIRE((whole == 0) == (damages == 0) || newest_rc < 0);
    REQUIRE(whole < 0 || (rc == 0 && fell_back == 0));
    REQUIRE(whole < 0 || image->forged || !newest_differs(image)); /* no byte is beyond a check */
    REQUIRE(rc == 0 || image->forged || !newest_is_whole(image));
    if (newest_rc == 0)
        table_holds(image, store, &newest, newest_table);
    if (rc < 0)
        return;
    table_holds(image, store, &recovered, table);
    slots_hold(image, store, table);
    is_newest_or_parent(image, store, &recovered, fell_back);
    REQUIRE(newest_rc == 0 && newest.sequence >= recovered.sequence);
    if (image->forged) {
        REQUIRE(store_weights_hash(store, table, &weights) == 0);
        return;
    }
    is_genuine(image, &recovered, table);
    REQUIRE(recovered.sequence == COMMITS - 1 || !newest_is_whole(image));
    REQUIRE(recovered.sequence == COMMITS - 1 ? fell_back == 0 : fell_back <= COMMITS - 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct image *image = &images[fuzz_u8(&in) % STORES];
    struct store *store = NULL;
    image_damage(image, &in);
    error_clear();
    int rc = store_open(&store, &image->f.options);
    if (rc < 0)
        fuzz_refused(rc, FUZZ_FAILED | FUZZ_USER);
    else if (store_state_now(store) == STORE_READY)
        recover(image, store);
    if (rc == 0)
        store_close(store);
    image_is_untouched(image);
    image_restore(image);
    return 0;
}

static struct fuzz_op with_value(struct fuzz_op op, uint64_t value, uint64_t bytes)
{
    memcpy(op.value, &value, sizeof value);
    op.extent = (uint8_t)((op.extent & ~7u) | (bytes - 1));
    return op;
}

/* The seals from the inside out: what a change broke, and what names it. */
static size_t append_seals(uint8_t *data, size_t size, size_t max_size, uint64_t slot,
                           uint64_t *random)
{
    const uint64_t record = COMMITS - 1 - fuzz_below(random, 2), place = record % 2;
    const struct fuzz_op seals[] = {
        with_value(image_op(SEAL_SLOT, 0, slot), fuzz_below(random, 8) != 0, 1),
        image_op(ADOPT_SLOT, place, slot),
        image_op(SEAL_ENTRY, place, slot / 3),
        image_op(SEAL_TABLE, 0, record),
    };
    for (unsigned i = 0; i < 4; i++)
        if (fuzz_below(random, 4) != 0)
            size = image_append(data, size, max_size, seals[i]);
    return size;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const uint16_t record_fields[] = {
        offsetof(struct commit_record, table_place),
        offsetof(struct commit_record, sequence),
        offsetof(struct commit_record, parent),
        offsetof(struct commit_record, table_bytes),
        offsetof(struct commit_record, table_digest),
        offsetof(struct commit_record, state_hash),
        offsetof(struct commit_record, facts.step),
        offsetof(struct commit_record, run),
        offsetof(struct commit_record, facts.spike_count),
    };
    uint64_t random = seed, value = fuzz_number(&random), bytes = 1 + fuzz_below(&random, 8);
    uint64_t slot = fuzz_below(&random, 3 * PAGES_MAX),
             record = COMMITS - 1 - fuzz_below(&random, 3);
    struct fuzz_op op;
    if (size < 1 || fuzz_below(&random, 3) == 0)
        return LLVMFuzzerMutate(data, size, max_size);
    if (fuzz_below(&random, 8) == 0)
        data[0] ^= 1; /* the other store */
    switch (fuzz_below(&random, 9)) {
    case 8: /* no record is left */
        for (record = 0; record < COMMITS; record++)
            size = image_append(data, size, max_size,
                                with_value(image_op(DAMAGE_RECORD, record, 600), value | 1, 8));
        return size;
    case 0:
    case 1:
        op = image_op(DAMAGE_RECORD, record, record_fields[fuzz_below(&random, 9)]);
        size = image_append(data, size, max_size, with_value(op, value, bytes));
        return image_append(data, size, max_size, image_op(SEAL_RECORD, 0, record));
    case 2:
    case 3:
        if (fuzz_below(&random, 2) == 0) { /* header and padding are under the digest, too */
            op = image_op(DAMAGE_TABLE, record, fuzz_random(&random));
            return image_append(data, size, max_size, with_value(op, value | 1, bytes));
        }
        op = image_op(DAMAGE_TABLE, record, 4096 + fuzz_below(&random, 128 * PAGES_MAX));
        size = image_append(data, size, max_size, with_value(op, value, bytes));
        size =
            image_append(data, size, max_size, image_op(SEAL_ENTRY, record, (op.at - 4096u) / 128));
        return image_append(data, size, max_size, image_op(SEAL_TABLE, 0, record));
    case 4:
    case 5:
        op = image_op(DAMAGE_SLOT, slot, fuzz_below(&random, 2) ? fuzz_below(&random, 200) : value);
        size = image_append(data, size, max_size, with_value(op, value, bytes));
        return append_seals(data, size, max_size, slot, &random);
    case 6:
        op = with_value(image_op(COPY_SLOT, 0, slot), fuzz_random(&random), 8);
        return image_append(data, size, max_size, op);
    default:
        op = image_op(DAMAGE_BYTE, fuzz_random(&random), fuzz_random(&random));
        return image_append(data, size, max_size, with_value(op, value | 1, 1));
    }
}
