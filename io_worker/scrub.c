/*
 * `mtlaunch scrub`: every byte that a resume could ever need, read and verified, nothing written.
 *
 *     superblocks    both copies in every directory
 *     records        all eight: their hashes, that none is missing or stale, the chain of parents
 *     newest commit  its table; each slot it names: header, identity, digest of each part, gaps
 *     the one before the same, where it differs; it is what recovery falls back to
 *     other slots    counted by what their headers say: no commit names them, so nothing is lost
 *                    with them, and a step that was cut off may have left any bytes there
 *
 * The commit before the newest one is given up by design once the newest was read back: the steps
 * in flight then take its slots and its table's place. Where a run was killed in such a moment the
 * newer versions in its slots say so, and that is no damage.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io_worker/io.h"
#include "io_worker/store_internal.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/printable.h"

enum commit_verdict {
    COMMIT_ABSENT,
    COMMIT_WHOLE,
    COMMIT_DAMAGED,
    COMMIT_GIVEN_UP, /* its place was taken by a step that was cut off */
};

struct scrub {
    struct io *io;
    struct store_damage_sink sink;
    struct store_ring *ring;
    void *sector; /* aligned for direct I/O */
    const struct commit_record *newest, *parent;
    struct page_entry *newest_table, *parent_table; /* (n_pages) each */
    enum commit_verdict newest_verdict, parent_verdict;
    uint64_t slots_older, slots_empty, slots_torn; /* that neither commit names */
};

/* One line per damage, at once: there may be more of them than any buffer holds. */
static void on_damage(void *context, const char *file, uint64_t offset, const char *text)
{
    struct io *io = context;
    io->w->self->damages++;
    printable_put(file, stdout);
    (void)printf(": offset %" PRIu64 ": ", offset);
    printable_put(text, stdout);
    (void)fputc('\n', stdout);
    (void)fflush(stdout); /* nobody may be listening */
}

static void tell(struct scrub *s, uint64_t offset)
{
    struct store *store = s->io->store;
    store_damage_tell(&s->sink, store_file_path(store, store_commit_file(store)), offset);
}

/* -- records -- */

/* The sequence that place i of the ring must hold when `newest` is the newest. */
static int expected_sequence(uint64_t newest, uint64_t i, uint64_t *sequence)
{
    uint64_t back = (newest % COMMIT_RECORD_RING + COMMIT_RECORD_RING - i) % COMMIT_RECORD_RING;
    *sequence = newest - back;
    return back <= newest;
}

/* A record whose own hash is good may still be old: the write of the one that belongs there was
 * lost. */
static void check_place(struct scrub *s, uint64_t i)
{
    const struct commit_record *record = &s->ring->records[i];
    uint64_t wanted, n_pages = store_n_pages(s->io->store);
    int due = expected_sequence(s->newest->sequence, i, &wanted);
    if (s->ring->unreadable[i] ||
        (!s->ring->valid[i] && !(due && store_is_zero(record, sizeof *record))))
        return; /* told when it was loaded, or rightly empty */
    if (s->ring->valid[i] && due && record->sequence == wanted) {
        if (wanted == 0 || wanted + COMMIT_RECORD_RING == s->newest->sequence + 1 ||
            store_ring_parent(s->ring, record))
            return;
        uint64_t before = (wanted - 1) % COMMIT_RECORD_RING;
        if (!s->ring->valid[before] || s->ring->records[before].sequence != wanted - 1)
            return; /* that one is told by itself */
        (void)error_set(ERROR_FAILED,
                        "commit record of sequence %" PRIu64 ": the record before it is another "
                        "than the one it names as its parent",
                        wanted);
    } else if (!s->ring->valid[i]) {
        (void)error_set(ERROR_FAILED, "commit record: expected sequence %" PRIu64 ", found zeros",
                        wanted);
    } else {
        (void)error_set(ERROR_FAILED,
                        "commit record: expected sequence %" PRIu64 ", found %" PRIu64
                        ": a write was lost",
                        wanted, record->sequence);
    }
    tell(s, commit_record_offset(n_pages, i));
}

static int check_records(struct scrub *s)
{
    if (store_ring_load(s->io->store, &s->ring, &s->sink) < 0)
        return -(int)error_kind_now();
    s->newest = store_ring_newest(s->ring);
    if (!s->newest) {
        (void)error_set(ERROR_FAILED, "expected a valid commit record, found none in %d places",
                        COMMIT_RECORD_RING);
        tell(s, commit_record_offset(store_n_pages(s->io->store), 0));
        return 0;
    }
    for (uint64_t i = 0; i < COMMIT_RECORD_RING; i++)
        check_place(s, i);
    s->parent = store_ring_parent(s->ring, s->newest);
    return 0;
}

/* -- one sector -- */

static int read_sector(struct scrub *s, unsigned file, uint64_t offset)
{
    struct io_request read = {
        .op = IO_READ, .file = file, .buffer = s->sector, .offset = offset, .bytes = SECTOR_BYTES};
    s->sink.bytes += SECTOR_BYTES;
    return engine_run(s->io->engine, &read);
}

enum slot_content { SLOT_EMPTY, SLOT_VERSION, SLOT_TORN };

/* What the header in a slot says; *version if it is whole and of this page. */
static enum slot_content look_into_slot(struct scrub *s, uint64_t page, uint32_t slot,
                                        uint64_t *version)
{
    struct page_image_layout layout;
    struct page_identity identity;
    struct page_image_header header;
    struct store *store = s->io->store;
    if (read_sector(s, store_page_file(store, page), store_slot_offset(store, page, slot)) < 0)
        return SLOT_TORN;
    if (store_is_zero(s->sector, SECTOR_BYTES))
        return SLOT_EMPTY;
    memcpy(&header, s->sector, sizeof header);
    store_page_layout(store, page, &layout);
    store_page_identity(store, page, header.version, &identity);
    *version = header.version;
    return page_image_verify_header(s->sector, &layout, &identity) == 0 ? SLOT_VERSION : SLOT_TORN;
}

/* -- commits -- */

static int check_newest(struct scrub *s)
{
    struct io *io = s->io;
    uint64_t before = s->sink.count;
    s->newest_verdict = COMMIT_ABSENT;
    if (!s->newest)
        return 0;
    int rc = store_table_load(io->store, s->newest, s->newest_table);
    if (rc == -ERROR_STOPPED)
        return rc;
    if (rc < 0)
        tell(s, store_table_offset(io->store, s->newest));
    else if (store_pages_verify(io->store, s->newest_table, NULL, &s->sink) == -ERROR_STOPPED)
        return -ERROR_STOPPED;
    s->newest_verdict = s->sink.count > before ? COMMIT_DAMAGED : COMMIT_WHOLE;
    if (memcmp(&s->newest->facts.config, io->plan->bits_hash, sizeof s->newest->facts.config) !=
        0) {
        char path[PATH_MAX];
        (void)snprintf(path, sizeof path, "%s/config.toml",
                       plan_text_get(io->plan, io->plan->output_dir));
        (void)error_set(ERROR_FAILED,
                        "the keys that determine bits are not those of the newest commit");
        store_damage_tell(&s->sink, path, 0);
    }
    return 0;
}

/* 1 when a step after the newest commit has begun to take the place of the one before. */
static int table_is_taken(struct scrub *s)
{
    const struct store *store = s->io->store;
    return read_sector(s, store_commit_file(store), store_table_offset(store, s->parent)) == 0 &&
           commit_table_sequence(s->sector, store_options_of(store)->run) ==
               s->newest->sequence + 1;
}

static int a_slot_is_taken(struct scrub *s)
{
    const struct io *io = s->io;
    uint64_t version = 0;
    for (uint64_t p = 0; p < store_n_pages(io->store); p++)
        if (memcmp(&s->parent_table[p], &s->newest_table[p], sizeof s->parent_table[p]) != 0 &&
            look_into_slot(s, p, s->parent_table[p].slot, &version) == SLOT_VERSION &&
            version > s->newest->facts.step)
            return 1;
    return 0;
}

static int check_parent(struct scrub *s)
{
    struct io *io = s->io;
    uint64_t before = s->sink.count;
    s->parent_verdict = COMMIT_ABSENT;
    if (!s->parent)
        return 0;
    int rc = store_table_load(io->store, s->parent, s->parent_table);
    if (rc == -ERROR_STOPPED)
        return rc;
    if (rc < 0) {
        char why[1024];
        (void)snprintf(why, sizeof why, "%.1000s", error_text());
        s->parent_verdict = table_is_taken(s) ? COMMIT_GIVEN_UP : COMMIT_DAMAGED;
        (void)error_set(ERROR_FAILED, "%s", why);
        if (s->parent_verdict == COMMIT_DAMAGED)
            tell(s, store_table_offset(io->store, s->parent));
        return 0;
    }
    if (s->newest_verdict != COMMIT_ABSENT && a_slot_is_taken(s)) {
        s->parent_verdict = COMMIT_GIVEN_UP;
        return 0;
    }
    /* what both name was looked at; where that was not whole, neither is this one */
    const struct page_entry *known = s->newest_verdict == COMMIT_WHOLE ? s->newest_table : NULL;
    if (store_pages_verify(io->store, s->parent_table, known, &s->sink) == -ERROR_STOPPED)
        return -ERROR_STOPPED;
    s->parent_verdict = s->sink.count > before ? COMMIT_DAMAGED : COMMIT_WHOLE;
    return 0;
}

/* -- the slots that no commit names -- */

static int is_named(const struct scrub *s, uint64_t page, uint32_t slot)
{
    int by_newest = s->newest_verdict == COMMIT_WHOLE || s->newest_verdict == COMMIT_DAMAGED;
    int by_parent = s->parent_verdict == COMMIT_WHOLE || s->parent_verdict == COMMIT_DAMAGED;
    return (by_newest && s->newest_table[page].slot == slot) ||
           (by_parent && s->parent_table[page].slot == slot);
}

static int count_other_slots(struct scrub *s)
{
    struct store *store = s->io->store;
    uint64_t version;
    for (uint64_t p = 0; p < store_n_pages(store); p++) {
        if (worker_check(s->io->w) < 0)
            return -(int)error_kind_now();
        for (uint32_t slot = 0; slot < store_slots_per_page(store); slot++) {
            if (is_named(s, p, slot))
                continue;
            enum slot_content content = look_into_slot(s, p, slot, &version);
            s->slots_older += content == SLOT_VERSION;
            s->slots_empty += content == SLOT_EMPTY;
            s->slots_torn += content == SLOT_TORN;
        }
    }
    return 0;
}

/* -- what it means -- */

static const char *verdict_text(enum commit_verdict verdict)
{
    switch (verdict) {
    case COMMIT_WHOLE:
        return "whole";
    case COMMIT_DAMAGED:
        return "damaged";
    case COMMIT_GIVEN_UP:
        return "given up, as it should be: a step that was cut off had begun to take its place";
    case COMMIT_ABSENT:
        break;
    }
    return "absent";
}

static void summarize(struct scrub *s, double seconds)
{
    struct worker_control *self = s->io->w->self;
    size_t n = 0, bytes = sizeof self->message;
    char *out = self->message;
    const struct commit_record *resume = s->newest_verdict == COMMIT_WHOLE   ? s->newest
                                         : s->parent_verdict == COMMIT_WHOLE ? s->parent
                                                                             : NULL;
    self->resume_step = resume ? resume->facts.step : UINT64_MAX;
    if (resume)
        memcpy(self->state_hash[0], &resume->state_hash, sizeof self->state_hash[0]);
    if (s->newest)
        n += (size_t)snprintf(out + n, bytes - n, "newest commit: step %" PRIu64 ", %s\n",
                              s->newest->facts.step, verdict_text(s->newest_verdict));
    if (s->parent)
        n += (size_t)snprintf(out + n, bytes - n, "the commit before it: step %" PRIu64 ", %s\n",
                              s->parent->facts.step, verdict_text(s->parent_verdict));
    n += (size_t)snprintf(out + n, bytes - n,
                          "slots that no commit needs: %" PRIu64 " with older or unfinished "
                          "versions, %" PRIu64 " never written, %" PRIu64
                          " without a whole header\n",
                          s->slots_older, s->slots_empty, s->slots_torn);
    (void)snprintf(out + n, bytes - n, "%" PRIu64 " bytes read in %.1f s, %.2f GB/s\n",
                   s->sink.bytes, seconds, (double)s->sink.bytes * 1e-9 / seconds);
}

static int look_at_everything(struct scrub *s)
{
    struct io *io = s->io;
    uint64_t start = clock_now_ns();
    s->sink.bytes = (uint64_t)store_directory_count(io->store) * SUPERBLOCK_COPIES * SECTOR_BYTES +
                    commit_file_bytes(store_n_pages(io->store));
    if (store_superblocks_verify(io->store, &s->sink) < 0 || check_records(s) < 0 ||
        check_newest(s) < 0 || check_parent(s) < 0 || count_other_slots(s) < 0)
        return -(int)error_kind_now();
    summarize(s, clock_seconds_since(start) + 1e-9);
    return 0;
}

/* A store that does not even open is damage too, and the text names the file. */
static int tell_unopened(struct io *io)
{
    enum error_kind kind = error_kind_now();
    if (kind == ERROR_STOPPED || kind == ERROR_BUSY)
        return -(int)kind;
    io->w->self->damages++;
    io->w->self->resume_step = UINT64_MAX;
    printable_put(error_text(), stdout);
    (void)fputs("\n", stdout);
    (void)fflush(stdout); /* nobody may be listening */
    return 0;
}

int scrub_run(struct io *io)
{
    struct scrub s = {.io = io, .sink = {.on_damage = on_damage, .context = io}};
    int exists = 0;
    if (start_store(io, &exists) < 0)
        return tell_unopened(io);
    if (!exists)
        return error_set(ERROR_USER, "%s: no commit yet", io->directories[0]);
    uint64_t n = store_n_pages(io->store);
    s.newest_table = calloc(n, sizeof *s.newest_table);
    s.parent_table = calloc(n, sizeof *s.parent_table);
    if (posix_memalign(&s.sector, SECTOR_BYTES, SECTOR_BYTES) != 0 || !s.newest_table ||
        !s.parent_table)
        return error_set(ERROR_FAILED, "out of memory for %" PRIu64 " pages", n);
    int rc = look_at_everything(&s);
    free(s.ring);
    free(s.sector);
    free(s.newest_table);
    free(s.parent_table);
    return rc;
}
