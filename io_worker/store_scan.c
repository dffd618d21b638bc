/*
 * Whole-store work by streaming: pages and tables verified, weights handed on and hashed.
 *
 * Everything here is one pattern: a producer names pieces of files in order, SCAN_DEPTH of them are
 * in flight, a consumer takes them in the same order. Memory is SCAN_DEPTH chunks however large the
 * model is, and disk and hashing overlap.
 */
#include "io_worker/store.h"
#include "io_worker/store_internal.h"

#include "model/split.h"
#include "procs/check.h"
#include "procs/clock.h"
#include "procs/error.h"
#include "procs/mutant.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    SCAN_DEPTH = 4,
    SCAN_CHUNK_BYTES = 2 << 20,
    SCAN_BUFFER_BYTES = SCAN_CHUNK_BYTES + 2 * SECTOR_BYTES, /* a piece need not be aligned */
    SCAN_PROGRESS_MS = 100,
    WEIGHTS_CHUNK_ELEMENTS = 1 << 18,
};

/* -- streaming -- */

/* Bytes [offset, offset + bytes) of an engine file; the rest is the producer's, for its consumer.
 */
struct piece {
    unsigned file;
    uint64_t offset;
    uint64_t bytes; /* at most SCAN_CHUNK_BYTES */
    uint64_t page;
    uint64_t at; /* bytes or elements from the start of what is streamed of the page */
    enum page_part part;
};

struct scan {
    struct store *store;
    int (*next)(void *context, struct piece *piece);                         /* 0: no more */
    int (*take)(void *context, const struct piece *piece, const void *data); /* nonzero stops */
    void *context;
    enum store_activity activity;
    uint64_t total_bytes; /* 0: tells no progress */
    uint64_t done_bytes;
};

struct scan_slot {
    struct io_request request;
    struct piece piece;
    unsigned char *buffer;
    int done;
};

static void on_piece_read(struct io_request *request, int result)
{
    (void)result; /* looked at when the piece is taken */
    ((struct scan_slot *)request->context)->done = 1;
}

static void submit_piece(struct scan *scan, struct scan_slot *slot)
{
    const uint64_t begin = slot->piece.offset / SECTOR_BYTES * SECTOR_BYTES;
    const uint64_t end =
        (slot->piece.offset + slot->piece.bytes + SECTOR_BYTES - 1) / SECTOR_BYTES * SECTOR_BYTES;
    CHECK(end - begin <= SCAN_BUFFER_BYTES);
    slot->done = 0;
    slot->request = (struct io_request){.op = IO_READ,
                                        .file = slot->piece.file,
                                        .buffer = slot->buffer,
                                        .offset = begin,
                                        .bytes = end - begin,
                                        .on_done = on_piece_read,
                                        .context = slot};
    struct engine *engine = store_engine(scan->store);
    while (engine_submit(engine, &slot->request) == ENGINE_FULL)
        (void)engine_wait(engine, 100);
}

static int take_piece(struct scan *scan, struct scan_slot *slot)
{
    struct engine *engine = store_engine(scan->store);
    while (!slot->done)
        (void)engine_wait(engine, 100);
    if (slot->request.result < 0)
        return engine_request_error(engine, &slot->request);
    scan->done_bytes += slot->piece.bytes;
    return scan->take(scan->context, &slot->piece,
                      slot->buffer + slot->piece.offset % SECTOR_BYTES);
}

static int scan_tell(const struct scan *scan)
{
    const struct store_options *options = store_options_of(scan->store);
    if (scan->total_bytes == 0 || options->on_progress == NULL)
        return 0;
    if (options->on_progress(options->progress_context, scan->activity, scan->done_bytes,
                             scan->total_bytes))
        return error_set(ERROR_STOPPED, "stopped on request");
    return 0;
}

static int scan_loop(struct scan *scan, struct scan_slot slots[SCAN_DEPTH])
{
    uint64_t submitted = 0, taken = 0, told_ns = clock_now_ns();
    int more = 1, rc = 0;
    while (rc == 0 && (more || taken < submitted)) {
        struct scan_slot *free_slot = &slots[submitted % SCAN_DEPTH];
        if (more && submitted - taken < SCAN_DEPTH) {
            more = scan->next(scan->context, &free_slot->piece);
            if (more) {
                submit_piece(scan, free_slot);
                submitted++;
            }
            continue;
        }
        rc = take_piece(scan, &slots[taken % SCAN_DEPTH]);
        taken++;
        if (rc == 0 && clock_now_ns() - told_ns > SCAN_PROGRESS_MS * 1000000ull) {
            told_ns = clock_now_ns();
            rc = scan_tell(scan);
        }
    }
    for (; taken < submitted; taken++) /* the buffers are about to go */
        while (!slots[taken % SCAN_DEPTH].done)
            (void)engine_wait(store_engine(scan->store), 100);
    return rc;
}

static int scan_run(struct scan *scan)
{
    CHECK(store_engine(scan->store) != NULL);
    unsigned char *buffers;
    if (posix_memalign((void **)&buffers, SECTOR_BYTES, (size_t)SCAN_DEPTH * SCAN_BUFFER_BYTES) !=
        0)
        return error_set(ERROR_FAILED, "store: out of memory");
    struct scan_slot slots[SCAN_DEPTH];
    for (unsigned i = 0; i < SCAN_DEPTH; i++) {
        slots[i].buffer = buffers + (size_t)i * SCAN_BUFFER_BYTES;
        slots[i].done = 1;
    }
    int rc = scan_loop(scan, slots);
    free(buffers);
    return rc;
}

/* -- hashing -- */

static XXH3_state_t *hash_open(void)
{
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    return state;
}

static void hash_add(XXH3_state_t *state, const void *data, uint64_t bytes)
{
    CHECK(XXH3_128bits_update(state, data, bytes) == XXH_OK);
}

static struct page_digest hash_value(const XXH3_state_t *state)
{
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    return (struct page_digest){hash.low64, hash.high64};
}

/* -- pages: every byte of every slot that a table names -- */

struct page_scan {
    struct store *store;
    const struct page_entry *table;
    const struct page_entry *known; /* another table: what it names too is left out; or NULL */
    uint64_t end;                   /* pages [.., end) */
    /* producer */
    uint64_t next_page, next_at;
    /* consumer */
    struct page_image_layout layout;
    XXH3_state_t *hash;
    uint64_t bad_page, bad_at; /* when take said no: where, in bytes from the slot's start */
};

static int is_known(const struct page_entry *known, const struct page_entry *table, uint64_t page)
{
    return known && memcmp(&known[page], &table[page], sizeof table[page]) == 0;
}

static int next_page_piece(void *context, struct piece *piece)
{
    struct page_scan *scan = context;
    while (scan->next_page < scan->end && is_known(scan->known, scan->table, scan->next_page))
        scan->next_page++;
    if (scan->next_page == scan->end)
        return 0;
    const struct page_entry *entry = &scan->table[scan->next_page];
    struct page_image_layout layout;
    store_page_layout(scan->store, entry->page, &layout);
    uint64_t bytes = page_image_bytes(&layout, entry->codec);
    uint64_t left = bytes - scan->next_at;
    *piece = (struct piece){.file = store_page_file(scan->store, entry->page),
                            .offset = store_slot_offset(scan->store, entry->page, entry->slot) +
                                      scan->next_at,
                            .bytes = left < SCAN_CHUNK_BYTES ? left : SCAN_CHUNK_BYTES,
                            .page = scan->next_page,
                            .at = scan->next_at};
    scan->next_at += piece->bytes;
    if (scan->next_at == bytes) {
        scan->next_page++;
        scan->next_at = 0;
    }
    return 1;
}

static int page_header_is_good(struct page_scan *scan, const struct page_entry *entry,
                               const void *data)
{
    struct page_identity identity;
    struct page_image_header header;
    store_page_layout(scan->store, entry->page, &scan->layout);
    store_page_identity(scan->store, entry->page, entry->version, &identity);
    if (page_image_verify_header(data, &scan->layout, &identity) < 0)
        return -ERROR_FAILED;
    memcpy(&header, data, sizeof header);
    if (header.codec != entry->codec)
        return error_set(ERROR_FAILED, "page header: codec: expected %u, found %u", entry->codec,
                         header.codec);
    for (unsigned part = 0; part < PART_COUNT; part++)
        if (header.length[part] != entry->length[part] ||
            !page_digest_equal(header.digest[part], entry->digest[part]))
            return error_set(ERROR_FAILED,
                             "page header: digest of %s is not the one the commit names: the write "
                             "of this version was lost",
                             page_part_name(part));
    return 0;
}

static int gap_store_is_zero(const unsigned char *data, uint64_t at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        if (data[i] != 0)
            return error_set(ERROR_FAILED, "byte %llu between parts: expected 0, found %u",
                             (unsigned long long)(at + i), data[i]);
    return 0;
}

/* The stretch that begins at `at`: part (or PART_COUNT for a gap) and where it ends. */
static enum page_part stretch(const struct page_scan *scan, const struct page_entry *entry,
                              uint64_t at, uint64_t *end)
{
    *end = page_image_bytes(&scan->layout, entry->codec);
    for (unsigned part = 0; part < PART_COUNT; part++) {
        const uint64_t begin = scan->layout.offset[part];
        if (entry->length[part] == 0 || at >= begin + entry->length[part])
            continue;
        *end = at < begin ? begin : begin + entry->length[part];
        return at < begin ? PART_COUNT : (enum page_part)part;
    }
    return PART_COUNT;
}

static int part_ends(struct page_scan *scan, const struct page_entry *entry, enum page_part part)
{
    struct page_digest found = hash_value(scan->hash);
    CHECK(XXH3_128bits_reset(scan->hash) == XXH_OK);
    if (page_digest_equal(found, entry->digest[part]))
        return 0;
    char want[33], have[33];
    page_digest_format(entry->digest[part], want);
    page_digest_format(found, have);
    scan->bad_at = scan->layout.offset[part];
    return error_set(ERROR_FAILED, "digest of %s (%llu bytes): expected %s, found %s",
                     page_part_name(part), (unsigned long long)entry->length[part], want, have);
}

static int check_piece(struct page_scan *scan, const struct piece *piece, const unsigned char *data)
{
    const struct page_entry *entry = &scan->table[piece->page];
    uint64_t at = piece->at;
    scan->bad_at = at;
    if (at == 0) {
        if (page_header_is_good(scan, entry, data) < 0)
            return -ERROR_FAILED;
        CHECK(XXH3_128bits_reset(scan->hash) == XXH_OK);
        at = PAGE_IMAGE_HEADER_BYTES;
    }
    const uint64_t piece_end = piece->at + piece->bytes;
    while (at < piece_end) {
        uint64_t end;
        enum page_part part = stretch(scan, entry, at, &end);
        const uint64_t to = end < piece_end ? end : piece_end;
        const unsigned char *here = data + (at - piece->at);
        scan->bad_at = at;
        if (part == PART_COUNT && gap_store_is_zero(here, at, to - at) < 0)
            return -ERROR_FAILED;
        if (part != PART_COUNT)
            hash_add(scan->hash, here, to - at);
        if (part != PART_COUNT && to == end && part_ends(scan, entry, part) < 0)
            return -ERROR_FAILED;
        at = to;
    }
    return 0;
}

static int take_page_piece(void *context, const struct piece *piece, const void *data)
{
    struct page_scan *scan = context;
    scan->bad_page = piece->page;
    return check_piece(scan, piece, data);
}

static uint64_t pages_bytes(const struct store *store, const struct page_entry *table,
                            const struct page_entry *known)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < store_n_pages(store); i++) {
        struct page_image_layout layout;
        store_page_layout(store, i, &layout);
        bytes += is_known(known, table, i) ? 0 : page_image_bytes(&layout, table[i].codec);
    }
    return bytes;
}

/* Verifies pages [from, end). On failure scan->bad_page and bad_at say where. */
static int check_pages(struct page_scan *pages, struct scan *progress, uint64_t from, uint64_t end)
{
    pages->next_page = from;
    pages->next_at = 0;
    pages->end = end;
    pages->bad_page = from;
    progress->store = pages->store;
    progress->next = next_page_piece;
    progress->take = take_page_piece;
    progress->context = pages;
    return scan_run(progress);
}

void store_damage_tell(struct store_damage_sink *sink, const char *file, uint64_t offset)
{
    if (sink->count++ == 0)
        (void)snprintf(sink->first, sizeof sink->first, "%s: offset %llu: %.700s", file,
                       (unsigned long long)offset, error_text());
    if (sink->on_damage)
        sink->on_damage(sink->context, file, offset, error_text());
}

static void tell_page_damage(const struct page_scan *pages, struct store_damage_sink *sink)
{
    const struct page_entry *entry = &pages->table[pages->bad_page];
    error_wrap("page %llu (layer %u, version %llu, slot %u)", (unsigned long long)entry->page,
               entry->layer, (unsigned long long)entry->version, entry->slot);
    store_damage_tell(sink,
                      store_file_path(pages->store, store_page_file(pages->store, entry->page)),
                      store_slot_offset(pages->store, entry->page, entry->slot) + pages->bad_at);
}

/* A page that failed once: 0 it was not the page, ERROR_FAILED it is damaged, ERROR_STOPPED. */
static int check_page_again(struct page_scan *pages, uint64_t page)
{
    int rc = -ERROR_FAILED;
    for (int reads = 1; reads < RECOVERY_READS && rc == -ERROR_FAILED; reads++) {
        struct scan again = {0};
        rc = check_pages(pages, &again, page, page + 1);
    }
    return rc;
}

/* All pages of the table. Returns 0 (see sink->count for damage) or ERROR_STOPPED. */
int store_pages_verify(struct store *store, const struct page_entry *table,
                       const struct page_entry *known, struct store_damage_sink *sink)
{
    struct page_scan pages = {.store = store, .table = table, .known = known, .hash = hash_open()};
    struct scan progress = {.activity = STORE_VERIFYING,
                            .total_bytes = pages_bytes(store, table, known)};
    const uint64_t n = store_n_pages(store);
    int rc = 0;
    uint64_t from = 0;
    while (from < n) {
        rc = check_pages(&pages, &progress, from, n);
        if (rc == 0 || rc == -ERROR_STOPPED)
            break;
        const uint64_t page = pages.bad_page;
        rc = check_page_again(&pages, page);
        if (rc == -ERROR_STOPPED)
            break;
        if (rc < 0) {
            rc = 0;
            pages.bad_page = page;
            tell_page_damage(&pages, sink);
            if (sink->on_damage == NULL)
                break;
        }
        from = page + 1;
    }
    (void)XXH3_freeState(pages.hash);
    sink->bytes += progress.done_bytes;
    return rc == -ERROR_STOPPED || sink->count > 0 ? rc : scan_tell(&progress);
}

/* -- tables -- */

struct table_scan {
    struct store *store;
    const struct commit_record *record;
    struct page_entry *table;
    uint64_t next_at;
    XXH3_state_t *hash;
};

/* By the store's own size: the record's is not checked yet where this is told. */
uint64_t store_table_offset(const struct store *store, const struct commit_record *record)
{
    return record->table_place * commit_table_bytes(store_n_pages(store));
}

static int next_table_piece(void *context, struct piece *piece)
{
    struct table_scan *scan = context;
    uint64_t left = scan->record->table_bytes - scan->next_at;
    if (left == 0)
        return 0;
    *piece = (struct piece){.file = store_commit_file(scan->store),
                            .offset = store_table_offset(scan->store, scan->record) + scan->next_at,
                            .bytes = left < SCAN_CHUNK_BYTES ? left : SCAN_CHUNK_BYTES,
                            .at = scan->next_at};
    scan->next_at += piece->bytes;
    return 1;
}

static int take_table_piece(void *context, const struct piece *piece, const void *data)
{
    struct table_scan *scan = context;
    hash_add(scan->hash, data, piece->bytes);
    const uint64_t header = SECTOR_BYTES;
    const uint64_t end = header + store_n_pages(scan->store) * sizeof scan->table[0];
    const uint64_t from = piece->at > header ? piece->at : header;
    const uint64_t to = piece->at + piece->bytes < end ? piece->at + piece->bytes : end;
    if (from < to)
        memcpy((unsigned char *)scan->table + (from - header),
               (const unsigned char *)data + (from - piece->at), to - from);
    return 0;
}

/* Reads the table a record names and checks it against the record. */
int store_table_load(struct store *store, const struct commit_record *record,
                     struct page_entry *table)
{
    const uint64_t expected = commit_table_bytes(store_n_pages(store));
    if (record->table_bytes != expected)
        return error_set(ERROR_FAILED, "digest table: bytes: expected %llu, found %llu",
                         (unsigned long long)expected, (unsigned long long)record->table_bytes);
    struct table_scan tables = {
        .store = store, .record = record, .table = table, .hash = hash_open()};
    struct scan scan = {
        .store = store, .next = next_table_piece, .take = take_table_piece, .context = &tables};
    int rc = scan_run(&scan);
    struct page_digest found = hash_value(tables.hash);
    (void)XXH3_freeState(tables.hash);
    if (rc < 0)
        return rc;
    if (mutant(MUTANT_no_table_digest))
        return 0;
    if (!page_digest_equal(found, record->table_digest)) {
        char want[33], have[33];
        page_digest_format(record->table_digest, want);
        page_digest_format(found, have);
        return error_set(ERROR_FAILED, "digest table of sequence %llu: expected %s, found %s",
                         (unsigned long long)record->sequence, want, have);
    }
    if (store_check_table(store, table) < 0)
        return error_wrap("digest table of sequence %llu", (unsigned long long)record->sequence);
    struct page_digest state = commit_state_hash(&record->facts, table, store_n_pages(store));
    if (!page_digest_equal(state, record->state_hash))
        return error_set(ERROR_FAILED, "digest table: state hash differs from the record's");
    return 0;
}

/* -- weights -- */

struct weights_scan {
    struct store *store;
    const struct page_entry *table;
    uint64_t next_page, next_element;
    enum page_part next_part;
    uint16_t *high; /* (WEIGHTS_CHUNK_ELEMENTS) bf16, kept until its residuals arrive */
    float *joined;  /* (WEIGHTS_CHUNK_ELEMENTS) f32 */
    store_weights_visitor *visitor;
    void *context;
};

static int is_split(const struct store *store)
{
    return store_options_of(store)->dtype == DTYPE_BFLOAT16;
}

/* float32: weights, weights, ...; bfloat16: weights, residual, weights, residual, ... */
static int next_weights_piece(void *context, struct piece *piece)
{
    struct weights_scan *scan = context;
    if (scan->next_page == store_n_pages(scan->store))
        return 0;
    const struct page_entry *entry = &scan->table[scan->next_page];
    struct page_image_layout layout;
    store_page_layout(scan->store, entry->page, &layout);
    const uint64_t element_bytes = is_split(scan->store) ? sizeof(uint16_t) : sizeof(float);
    uint64_t elements = layout.elements - scan->next_element;
    if (elements > WEIGHTS_CHUNK_ELEMENTS)
        elements = WEIGHTS_CHUNK_ELEMENTS;
    *piece = (struct piece){.file = store_page_file(scan->store, entry->page),
                            .offset = store_slot_offset(scan->store, entry->page, entry->slot) +
                                      layout.offset[scan->next_part] +
                                      scan->next_element * element_bytes,
                            .bytes = elements * element_bytes,
                            .page = scan->next_page,
                            .at = scan->next_element,
                            .part = scan->next_part};
    if (is_split(scan->store) && scan->next_part == PART_WEIGHTS) {
        scan->next_part = PART_RESIDUAL;
        return 1;
    }
    scan->next_part = PART_WEIGHTS;
    scan->next_element += elements;
    if (scan->next_element == layout.elements) {
        scan->next_page++;
        scan->next_element = 0;
    }
    return 1;
}

static int take_weights_piece(void *context, const struct piece *piece, const void *data)
{
    struct weights_scan *scan = context;
    if (!is_split(scan->store))
        return scan->visitor(scan->context, piece->page, piece->at, data,
                             piece->bytes / sizeof(float));
    if (piece->part == PART_WEIGHTS) {
        memcpy(scan->high, data, piece->bytes);
        return 0;
    }
    const uint64_t elements = piece->bytes / sizeof(uint16_t);
    join_master(scan->high, data, elements, scan->joined);
    return scan->visitor(scan->context, piece->page, piece->at, scan->joined, elements);
}

int store_weights_stream(struct store *store, const struct page_entry *table,
                         store_weights_visitor *visitor, void *context)
{
    struct weights_scan weights = {
        .store = store, .table = table, .visitor = visitor, .context = context};
    weights.high = malloc(WEIGHTS_CHUNK_ELEMENTS * sizeof weights.high[0]);
    weights.joined = malloc(WEIGHTS_CHUNK_ELEMENTS * sizeof weights.joined[0]);
    struct scan scan = {.store = store,
                        .next = next_weights_piece,
                        .take = take_weights_piece,
                        .context = &weights,
                        .activity = STORE_HASHING};
    for (uint64_t i = 0; i < store_n_pages(store); i++)
        scan.total_bytes += store_options_of(store)->layout->pages[i].elements * sizeof(float);
    int rc = weights.high && weights.joined ? scan_run(&scan)
                                            : error_set(ERROR_FAILED, "store: out of memory");
    free(weights.high);
    free(weights.joined);
    return rc;
}

struct weights_hash {
    const struct model_layout *layout;
    XXH3_state_t *state;
};

static int hash_weights(void *context, uint64_t page, uint64_t first, const float *weights,
                        uint64_t elements)
{
    const struct weights_hash *hash = context;
    struct model_part parts[MODEL_LAYER_TENSORS_MAX];
    uint32_t n = model_page_parts(hash->layout, &hash->layout->pages[page], parts);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t from = parts[i].page_start > first ? parts[i].page_start : first;
        uint64_t part_end = parts[i].page_start + parts[i].count;
        uint64_t to = part_end < first + elements ? part_end : first + elements;
        if (from < to)
            hash_add(hash->state, weights + (from - first), (to - from) * sizeof weights[0]);
    }
    return 0;
}

int store_weights_hash(struct store *store, const struct page_entry *table, struct page_digest *out)
{
    struct weights_hash hash = {.layout = store_options_of(store)->layout, .state = hash_open()};
    int rc = store_weights_stream(store, table, hash_weights, &hash);
    *out = hash_value(hash.state);
    (void)XXH3_freeState(hash.state);
    return rc;
}
