/* Commit and recovery: what was acknowledged is there, and what is not whole is never believed. */
#include "tests/io/store_fixture.h"

#include <xxhash.h>

static void begin(struct fixture *f, enum dtype_mode dtype, unsigned n_directories, unsigned steps)
{
    fixture_init(f, dtype, 8192, n_directories);
    fixture_create(f);
    fixture_steps(f, steps);
}

static void expect_recovery(struct fixture *f, uint64_t step, uint64_t gave_up)
{
    uint64_t fell_back = 0;
    if (fixture_recover(f, &fell_back) < 0)
        fail_msg("%s", error_text());
    assert_int_equal(f->record.facts.step, step);
    assert_int_equal(fell_back, gave_up);
    assert_true(fixture_table_is_of_step(f, step));
}

static void what_was_committed_is_recovered(void **state)
{
    (void)state;
    for (unsigned d = 0; d < 4; d++) {
        struct fixture f;
        fixture_init(&f, d % 2 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, 8192, 1 + d / 2);
        f.options.engine = d % 2 ? ENGINE_SYNC : ENGINE_AUTO;
        fixture_create(&f);
        for (uint64_t step = 0; step < 10; step++) { /* past the ring of eight */
            struct commit_record acknowledged = f.record;
            expect_recovery(&f, step, 0);
            assert_memory_equal(&acknowledged, &f.record, sizeof acknowledged);
            assert_int_equal(f.record.sequence, step);
            fixture_steps(&f, 1);
        }
        fixture_destroy(&f);
    }
}

static void the_record_carries_what_was_given(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 3);
    struct commit_facts facts = fixture_facts(3);
    struct commit_record before = f.record;
    expect_recovery(&f, 3, 0);
    assert_memory_equal(&f.record.facts, &facts, sizeof facts);
    assert_memory_equal(f.record.run, f.options.run, RUN_UUID_BYTES);
    fixture_steps(&f, 1);
    struct page_digest parent = page_image_digest(&before, sizeof before);
    assert_true(page_digest_equal(f.record.parent, parent));
    assert_int_equal(f.record.table_place, 1 - before.table_place);
    fixture_destroy(&f);
}

/* Sealed, so that only what is wrong speaks; each refusal names it. */
static void expect_refusal(const struct fixture *f, struct commit_record *record, const char *why)
{
    commit_record_seal(record);
    assert_true(commit_record_verify(record, f->options.run, record->store) < 0);
    if (!strstr(error_text(), why))
        fail_msg("expected \"%s\", found \"%s\"", why, error_text());
}

static void a_record_that_does_not_fit_is_refused_by_name(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 1);
    struct commit_record good = f.record, r = good;
    assert_int_equal(commit_record_verify(&good, f.options.run, good.store), 0);
    r.run[3] ^= 1;
    expect_refusal(&f, &r, "of another run");
    r = good;
    r.table_place = 2;
    expect_refusal(&f, &r, "table place: expected 0 or 1, found 2");
    r = good;
    r.facts.spike_count = SPIKE_WINDOW_STEPS + 1;
    expect_refusal(&f, &r, "spike window: expected at most 32, found 33");
    r = good;
    memset(r.facts.lineage, 'x', sizeof r.facts.lineage);
    expect_refusal(&f, &r, "lineage: expected a text, found no end");
    r = good;
    r.store[0] ^= 1;
    assert_true(commit_record_verify(&r, f.options.run, good.store) < 0); /* not sealed again */
    assert_non_null(strstr(error_text(), "hash: expected"));
    commit_record_seal(&r);
    assert_true(commit_record_verify(&r, f.options.run, good.store) < 0);
    assert_non_null(strstr(error_text(), "of another store"));
    fixture_destroy(&f);
}

/* A digest table of another run, or none at all, has no sequence. */
static void a_table_names_its_run(void **state)
{
    (void)state;
    struct fixture f;
    static unsigned char head[4096];
    begin(&f, DTYPE_FLOAT32, 1, 1);
    struct commit_table_source source = {
        .sequence = 7, .n_pages = f.layout.n_pages, .table = f.committed};
    memcpy(source.run, f.options.run, sizeof source.run);
    commit_table_fill(&source, 0, head, sizeof head);
    assert_int_equal(commit_table_sequence(head, f.options.run), 7);
    uint8_t other[RUN_UUID_BYTES];
    memcpy(other, f.options.run, sizeof other);
    other[15] ^= 1;
    assert_true(commit_table_sequence(head, other) == UINT64_MAX);
    head[0] ^= 1; /* the magic */
    assert_true(commit_table_sequence(head, f.options.run) == UINT64_MAX);
    fixture_destroy(&f);
}

/* -- hashes -- */

static void the_state_hash_sees_state_and_nothing_else(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_BFLOAT16, 1, 2);
    const uint64_t n = f.layout.n_pages;
    struct commit_facts facts = f.record.facts;
    struct page_digest base = commit_state_hash(&facts, f.committed, n);
    assert_true(page_digest_equal(base, f.record.state_hash));
#define CHANGES(lvalue, expected)                                                                  \
    do {                                                                                           \
        lvalue ^= 1;                                                                               \
        assert_int_equal(!page_digest_equal(base, commit_state_hash(&facts, f.committed, n)),      \
                         expected);                                                                \
        lvalue ^= 1;                                                                               \
    } while (0)
    CHANGES(f.committed[1].version, 1);
    CHANGES(f.committed[1].layer, 1);
    CHANGES(f.committed[1].page, 1);
    CHANGES(f.committed[1].codec, 1);
    CHANGES(f.committed[n - 1].length[PART_V], 1);
    CHANGES(f.committed[n - 1].digest[PART_RESIDUAL].high, 1);
    CHANGES(f.committed[1].slot, 0);
    CHANGES(facts.data_position[3], 1);
    CHANGES(facts.optimizer_step, 1);
    CHANGES(facts.spike_count, 1);
    CHANGES(((unsigned char *)facts.spike_loss)[0], 1);
    CHANGES(((unsigned char *)facts.spike_norm)[0], 1);
    CHANGES(facts.seed, 0);
    CHANGES(facts.lineage[0], 0);
#undef CHANGES
    fixture_destroy(&f);
}

/* Straight over the tensors, without pages. */
static struct page_digest reference_weights_hash(const struct model_layout *layout,
                                                 uint64_t version)
{
    XXH3_state_t *hash = XXH3_createState();
    assert_int_equal(XXH3_128bits_reset(hash), XXH_OK);
    for (uint32_t t = 0; t < layout->n_tensors; t++)
        for (uint64_t e = 0; e < layout->tensors[t].elements; e++) {
            float value = fixture_value(layout->tensors[t].layer, layout->tensors[t].offset + e,
                                        version, PART_WEIGHTS);
            assert_int_equal(XXH3_128bits_update(hash, &value, sizeof value), XXH_OK);
        }
    XXH128_hash_t value = XXH3_128bits_digest(hash);
    (void)XXH3_freeState(hash);
    return (struct page_digest){value.low64, value.high64};
}

static void the_weights_hash_depends_on_the_weights_alone(void **state)
{
    (void)state;
    static const uint64_t page_elements[] = {4096, 8192, 1 << 20};
    for (unsigned i = 0; i < 6; i++) {
        struct fixture f;
        fixture_init(&f, i % 2 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, page_elements[i / 2], 1);
        fixture_create(&f);
        for (uint64_t step = 0; step < 2; step++) {
            struct page_digest hash, expected = reference_weights_hash(&f.layout, step);
            assert_int_equal(store_weights_hash(f.store, f.committed, &hash), 0);
            assert_true(page_digest_equal(hash, expected));
            fixture_steps(&f, 1);
        }
        fixture_destroy(&f);
    }
}

/* -- damage -- */

struct found_damage {
    unsigned count;
    char file[PATH_MAX];
    uint64_t offset;
};

static void note_damage(void *context, const char *file, uint64_t offset, const char *text)
{
    struct found_damage *found = context;
    assert_true(text[0] != '\0');
    if (found->count++ == 0) {
        (void)snprintf(found->file, sizeof found->file, "%s", file);
        found->offset = offset;
    }
}

/* Flips one bit; the damage is found and placed; recovery gives `step`; the bit is flipped back. */
static void flip_and_recover(struct fixture *f, const char *path, uint64_t offset, uint64_t step,
                             uint64_t gave_up)
{
    struct found_damage found = {0};
    struct commit_record record;
    uint64_t fell_back = 0;
    fixture_flip(path, offset);
    assert_int_equal(store_verify(f->store, &record, f->forming, note_damage, &found),
                     -ERROR_FAILED);
    assert_non_null(strstr(error_text(), path));
    assert_int_equal(found.count, 1);
    assert_string_equal(found.file, path);
    assert_true(found.offset <= offset);
    assert_int_equal(store_recover(f->store, &record, f->forming, &fell_back), 0);
    assert_int_equal(record.facts.step, step);
    assert_int_equal(fell_back, gave_up);
    fixture_flip(path, offset);
}

static void a_flipped_bit_in_any_region_costs_one_step_and_is_placed(void **state)
{
    (void)state;
    for (unsigned d = 0; d < 2; d++) {
        struct fixture f;
        begin(&f, d ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, 1 + d, 5);
        const uint64_t last = f.layout.n_pages - 1;
        const uint64_t pages[] = {0, 3, last};
        char slots[PATH_MAX], commit[PATH_MAX];
        for (unsigned i = 0; i < 3; i++) {
            struct page_image_layout layout;
            store_page_layout(f.store, pages[i], &layout);
            (void)snprintf(slots, sizeof slots, "%s",
                           store_file_path(f.store, store_page_file(f.store, pages[i])));
            uint64_t slot = store_slot_offset(f.store, pages[i], f.committed[pages[i]].slot);
            flip_and_recover(&f, slots, slot, 4, 5);        /* magic */
            flip_and_recover(&f, slots, slot + 100, 4, 5);  /* a length */
            flip_and_recover(&f, slots, slot + 4000, 4, 5); /* the header's padding */
            for (unsigned part = 0; part < PART_COUNT; part++) {
                if (layout.capacity[part] == 0)
                    continue;
                flip_and_recover(&f, slots, slot + layout.offset[part], 4, 5);
                flip_and_recover(&f, slots, slot + layout.offset[part] + layout.capacity[part] - 1,
                                 4, 5);
            }
            flip_and_recover(&f, slots, slot + layout.offset[PART_M] - 1, 4, 5); /* a gap */
            flip_and_recover(&f, slots, slot + layout.bytes - 1, 4, 5);
        }
        (void)snprintf(commit, sizeof commit, "%s",
                       store_file_path(f.store, store_commit_file(f.store)));
        uint64_t table = f.record.table_place * f.record.table_bytes;
        flip_and_recover(&f, commit, table, 4, 5);
        flip_and_recover(&f, commit, table + 4096 + 130, 4, 5);
        flip_and_recover(&f, commit, table + f.record.table_bytes - 1, 4, 5);
        uint64_t record = commit_record_offset(f.layout.n_pages, 5);
        flip_and_recover(&f, commit, record, 4, 0);
        flip_and_recover(&f, commit, record + 2000, 4, 0);
        flip_and_recover(&f, commit, record + 4095, 4, 0);
        assert_int_equal(store_verify(f.store, &f.record, f.forming, NULL, NULL), 0);
        expect_recovery(&f, 5, 0);
        fixture_destroy(&f);
    }
}

static void two_damaged_commits_stop_with_instructions_and_change_nothing(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 5);
    char slots[PATH_MAX];
    (void)snprintf(slots, sizeof slots, "%s", store_file_path(f.store, 0));
    for (uint32_t slot = 0; slot < 3; slot++)
        fixture_flip(slots, store_slot_offset(f.store, 2, slot) + 5000);
    uint64_t fell_back;
    assert_int_equal(fixture_recover(&f, &fell_back), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), slots));
    assert_non_null(strstr(error_text(), "offset"));
    assert_non_null(strstr(error_text(), "hint:"));
    for (uint32_t slot = 0; slot < 3; slot++)
        fixture_flip(slots, store_slot_offset(f.store, 2, slot) + 5000);
    expect_recovery(&f, 5, 0);
    fixture_destroy(&f);
}

static void no_valid_record_is_an_error_with_its_place(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 0);
    char commit[PATH_MAX];
    (void)snprintf(commit, sizeof commit, "%s", f.store->commit.path);
    fixture_flip(commit, commit_record_offset(f.layout.n_pages, 0) + 64);
    assert_int_equal(fixture_recover(&f, NULL), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), commit));
    fixture_destroy(&f);
}

/* After falling back, the next commit takes the damaged one's places and history goes on. */
static void after_a_fall_back_training_goes_on(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 5);
    char slots[PATH_MAX];
    (void)snprintf(slots, sizeof slots, "%s", store_file_path(f.store, 0));
    fixture_flip(slots, store_slot_offset(f.store, 1, f.committed[1].slot) + 4096);
    expect_recovery(&f, 4, 5);
    fixture_steps(&f, 1);
    assert_int_equal(f.record.sequence, 5);
    expect_recovery(&f, 5, 0);
    fixture_steps(&f, 3);
    expect_recovery(&f, 8, 0);
    fixture_destroy(&f);
}

static void zero_out(const char *path, uint64_t offset, uint64_t bytes)
{
    unsigned char *zeros = calloc(1, bytes);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(pwrite(fd, zeros, bytes, (off_t)offset), (ssize_t)bytes);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(close(fd), 0);
    free(zeros);
}

static void a_torn_record_or_table_gives_the_commit_before(void **state)
{
    (void)state;
    struct fixture f;
    char commit[PATH_MAX];
    begin(&f, DTYPE_FLOAT32, 1, 4);
    (void)snprintf(commit, sizeof commit, "%s", f.store->commit.path);
    zero_out(commit, commit_record_offset(f.layout.n_pages, 4) + 512, 3584);
    expect_recovery(&f, 3, 0);
    fixture_steps(&f, 1);
    zero_out(commit, f.record.table_place * f.record.table_bytes + 4096, 512);
    expect_recovery(&f, 3, 4);
    fixture_destroy(&f);
}

/* A slot that holds a whole page of an older step, as after a write that the drive forgot. */
static void a_stale_slot_is_found_by_its_version(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 5);
    struct io_request request = {.buffer = f.image};
    uint32_t slot = f.committed[3].slot;
    request.bytes = fixture_make_image(&f, 3, 2);
    store_request_page(f.store, &request, IO_WRITE, 3, slot);
    assert_int_equal(engine_run(store_engine(f.store), &request), 0);
    assert_int_equal(fixture_read_back(&f, 3), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "version: expected 5, found 2"));
    expect_recovery(&f, 4, 5);
    fixture_destroy(&f);
}

static void another_pages_image_is_found_by_its_identity(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 5);
    struct io_request request = {.buffer = f.image};
    uint32_t slot = f.committed[0].slot;
    request.bytes = fixture_make_image(&f, 1, 5); /* page 1 is as long as page 0 */
    store_request_page(f.store, &request, IO_WRITE, 0, slot);
    assert_int_equal(engine_run(store_engine(f.store), &request), 0);
    assert_int_equal(fixture_read_back(&f, 0), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "page: expected 0, found 1"));
    expect_recovery(&f, 4, 5);
    fixture_destroy(&f);
}

/* The same version with other content, sealed: only the commit's table can tell. */
static void a_page_of_an_abandoned_try_is_found_by_the_table(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, DTYPE_FLOAT32, 1, 5);
    struct page_image_layout layout;
    struct page_identity identity;
    struct io_request request = {.buffer = f.image};
    request.bytes = fixture_make_image(&f, 3, 5);
    store_page_layout(f.store, 3, &layout);
    store_page_identity(f.store, 3, 5, &identity);
    ((float *)page_image_part(f.image, &layout, PART_M))[7] += 1;
    page_image_seal(f.image, &layout, &identity, PAGE_RAW);
    store_request_page(f.store, &request, IO_WRITE, 3, f.committed[3].slot);
    assert_int_equal(engine_run(store_engine(f.store), &request), 0);
    assert_int_equal(fixture_read_back(&f, 3), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "lost"));
    expect_recovery(&f, 4, 5);
    fixture_destroy(&f);
}

/* -- lies of the drive -- */

static void a_lost_slot_write_costs_one_step_only(void **state)
{
    (void)state;
    for (unsigned nth = 1; nth < 12; nth += 5) {
        struct fixture f;
        struct liar liar = LIAR_HONEST(nth);
        begin(&f, DTYPE_FLOAT32, 1, 3);
        liar.lose_write_at = nth;
        fixture_lie(&f, &liar);
        assert_int_equal(fixture_step(&f), 0);  /* nothing can tell yet */
        assert_int_equal(fixture_step(&f), -1); /* the next apply reads it */
        assert_non_null(strstr(error_text(), "offset"));
        expect_recovery(&f, 3, 4);
        fixture_steps(&f, 2);
        fixture_destroy(&f);
    }
}

static void a_misdirected_write_costs_one_step_only(void **state)
{
    (void)state;
    for (int to = -1; to <= 1; to += 2) { /* page 3 lands on page 2 (already written) or 4 */
        struct fixture f;
        struct page_image_layout layout, neighbour;
        struct liar liar = LIAR_HONEST(1);
        begin(&f, DTYPE_FLOAT32, 1, 3);
        store_page_layout(f.store, 3, &layout);
        store_page_layout(f.store, (uint64_t)(3 + to), &neighbour);
        assert_int_equal(layout.bytes, neighbour.bytes);
        liar.misdirect_write_at = 4;
        liar.misdirect_by = to * 3 * (int64_t)layout.bytes; /* the same slot of the neighbour */
        fixture_lie(&f, &liar);
        assert_int_equal(fixture_step(&f), 0); /* nothing can tell yet */
        assert_int_equal(fixture_step(&f), -1);
        expect_recovery(&f, 3, 4);
        fixture_destroy(&f);
    }
}

static void a_commit_write_that_did_not_happen_is_found_before_it_is_announced(void **state)
{
    (void)state;
    for (unsigned which = 1; which <= 2; which++) {
        struct fixture f;
        struct liar liar = LIAR_HONEST(which);
        begin(&f, DTYPE_FLOAT32, 1, 3);
        liar.lose_write_at = (int64_t)f.layout.n_pages + which; /* the table, the record */
        fixture_lie(&f, &liar);
        assert_int_equal(fixture_step(&f), -1);
        assert_non_null(strstr(error_text(), "read back"));
        assert_non_null(strstr(error_text(), which == 1 ? "TABLE_READ" : "RECORD_READ"));
        assert_int_equal(commit_phase_now(f.commit), COMMIT_FAILED);
        expect_recovery(&f, 3, 0);
        fixture_destroy(&f);
    }
}

static void never_called(void *context, int result, const struct commit_record *record)
{
    (void)context;
    (void)result;
    (void)record;
    fail();
}

static void a_failed_flush_abandons_the_step_for_good(void **state)
{
    (void)state;
    struct fixture f;
    struct liar liar = LIAR_HONEST(3);
    begin(&f, DTYPE_FLOAT32, 2, 3);
    liar.fail_op = IO_FLUSH;
    liar.fail_at = 2; /* of the second directory */
    liar.fail_as = EIO;
    fixture_lie(&f, &liar);
    assert_int_equal(fixture_step(&f), -1);
    assert_non_null(strstr(error_text(), "fdatasync of "));
    assert_int_equal(liar.count[IO_FLUSH], 2);
    struct commit_facts facts = fixture_facts(4);
    assert_int_equal(commit_begin(f.commit, &facts, f.forming, never_called, NULL), -ERROR_FAILED);
    assert_int_equal(liar.count[IO_FLUSH], 2); /* an error is never tried again as success */
    expect_recovery(&f, 3, 0);
    fixture_destroy(&f);
}

static void short_transfers_and_interruptions_change_nothing(void **state)
{
    (void)state;
    struct fixture f;
    struct liar liar = LIAR_HONEST(11);
    begin(&f, DTYPE_BFLOAT16, 2, 1);
    liar.short_percent = 40;
    liar.retry_percent = 30;
    fixture_lie(&f, &liar);
    fixture_steps(&f, 3);
    struct commit_record record;
    assert_int_equal(store_recover(f.store, &record, f.forming, NULL), 0);
    assert_int_equal(record.facts.step, 4);
    expect_recovery(&f, 4, 0);
    fixture_destroy(&f);
}

static void an_error_while_reading_a_slot_gives_the_commit_before(void **state)
{
    (void)state;
    struct fixture f;
    struct liar liar = LIAR_HONEST(1);
    begin(&f, DTYPE_FLOAT32, 1, 3);
    fixture_lie(&f, &liar);
    struct commit_record record;
    uint64_t fell_back;
    liar.fail_op = IO_READ;
    liar.fail_as = EIO;
    liar.fail_at = 5; /* once: the page is read again before it counts as damaged */
    assert_int_equal(store_recover(f.store, &record, f.forming, &fell_back), 0);
    assert_int_equal(fell_back, 0);
    assert_int_equal(record.facts.step, 3);
    fixture_destroy(&f);
}

static void a_commit_waits_while_the_engine_is_full(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f, DTYPE_FLOAT32, 8192, 2);
    f.options.engine_depth = 1; /* two flushes at once do not fit */
    fixture_create(&f);
    fixture_steps(&f, 2);
    expect_recovery(&f, 2, 0);
    fixture_destroy(&f);
}

/* -- power loss -- */

/* One step, cut at transfer `budget`. 0: the step went through before the power went; 1: it was cut
 * and recovery gave what it must; -1: recovery broke its promise. */
static int cut_at(struct fixture *f, struct liar *liar, int64_t budget)
{
    const uint64_t acknowledged = f->step;
    liar->cache = 1;
    liar->power_budget = budget;
    fixture_lie(f, liar);
    int through = fixture_step(f) == 0;
    const uint64_t promised = through ? acknowledged + 1 : acknowledged;
    if (!liar->power_is_off)
        liar_cut_power(liar); /* right after the acknowledgement */
    if (fixture_recover(f, NULL) < 0)
        return -1;
    if (f->step < promised || f->step > acknowledged + 1 || !fixture_table_is_of_step(f, f->step))
        return -1;
    return through ? 0 : 1;
}

static void power_loss_at_any_transfer_keeps_every_acknowledged_step(void **state)
{
    (void)state;
    struct fixture f;
    unsigned cut = 0, through = 0;
    begin(&f, DTYPE_FLOAT32, 2, 2);
    const int64_t transfers = 2 * (int64_t)f.layout.n_pages + 2 + 4; /* pages, flushes, commit */
    for (uint64_t seed = 1; seed <= 4; seed++)
        for (int64_t budget = 0; budget <= transfers; budget += seed == 1 ? 1 : 3) {
            struct liar liar = LIAR_HONEST(seed * 1000 + (uint64_t)budget);
            int rc = cut_at(&f, &liar, budget);
            if (rc < 0)
                fail_msg("seed %llu, power cut at transfer %lld: %s",
                         (unsigned long long)(seed * 1000 + (uint64_t)budget), (long long)budget,
                         error_text());
            cut += rc == 1;
            through += rc == 0;
        }
    print_message("%u cut, %u through\n", cut, through);
    assert_true(cut > (unsigned)transfers && through > 0);
    fixture_destroy(&f);
}

/* The proof that the test above can fail: a drive that does not flush breaks the promise. */
static void without_the_flush_power_loss_does_break_it(void **state)
{
    (void)state;
    unsigned broken = 0;
    for (uint64_t seed = 1; seed <= 8 && broken == 0; seed++) {
        struct fixture f;
        struct liar liar = LIAR_HONEST(seed);
        liar.drop_flushes = 1;
        begin(&f, DTYPE_FLOAT32, 1, 2);
        broken += cut_at(&f, &liar, -1) < 0;
        fixture_destroy(&f);
    }
    assert_true(broken > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_committed_is_recovered),
        cmocka_unit_test(the_record_carries_what_was_given),
        cmocka_unit_test(a_record_that_does_not_fit_is_refused_by_name),
        cmocka_unit_test(a_table_names_its_run),
        cmocka_unit_test(the_state_hash_sees_state_and_nothing_else),
        cmocka_unit_test(the_weights_hash_depends_on_the_weights_alone),
        cmocka_unit_test(a_flipped_bit_in_any_region_costs_one_step_and_is_placed),
        cmocka_unit_test(two_damaged_commits_stop_with_instructions_and_change_nothing),
        cmocka_unit_test(no_valid_record_is_an_error_with_its_place),
        cmocka_unit_test(after_a_fall_back_training_goes_on),
        cmocka_unit_test(a_torn_record_or_table_gives_the_commit_before),
        cmocka_unit_test(a_stale_slot_is_found_by_its_version),
        cmocka_unit_test(another_pages_image_is_found_by_its_identity),
        cmocka_unit_test(a_page_of_an_abandoned_try_is_found_by_the_table),
        cmocka_unit_test(a_lost_slot_write_costs_one_step_only),
        cmocka_unit_test(a_misdirected_write_costs_one_step_only),
        cmocka_unit_test(a_commit_write_that_did_not_happen_is_found_before_it_is_announced),
        cmocka_unit_test(a_failed_flush_abandons_the_step_for_good),
        cmocka_unit_test(short_transfers_and_interruptions_change_nothing),
        cmocka_unit_test(an_error_while_reading_a_slot_gives_the_commit_before),
        cmocka_unit_test(a_commit_waits_while_the_engine_is_full),
        cmocka_unit_test(power_loss_at_any_transfer_keeps_every_acknowledged_step),
        cmocka_unit_test(without_the_flush_power_loss_does_break_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
