/* Where every page lies, and what an entry of the page table may say. */
#include "io_worker/store_internal.h"

#include "procs/check.h"
#include "procs/error.h"

#include <stdio.h>
#include <string.h>

#include <xxhash.h>

__extension__ typedef unsigned __int128 wide;

static uint64_t slot_bytes(const struct model_layout *layout, enum dtype_mode dtype, uint64_t page)
{
    struct page_image_layout image;
    page_image_layout(&image, dtype, layout->pages[page].elements);
    return image.bytes;
}

uint64_t store_bytes_needed(const struct model_layout *layout, enum dtype_mode dtype,
                            unsigned slots_per_page)
{
    uint64_t bytes = SUPERBLOCK_COPIES * SECTOR_BYTES + commit_file_bytes(layout->n_pages);
    for (uint64_t page = 0; page < layout->n_pages; page++)
        bytes += slots_per_page * slot_bytes(layout, dtype, page);
    return bytes;
}

/* The stripe map: each page goes where its bytes, counted against the weight, come to least.
 * Integers only, so that the map is the same wherever it is computed from the same superblock. */
void store_map_pages(struct store *store)
{
    const struct model_layout *layout = store->options.layout;
    const unsigned n = store->options.n_directories;
    for (unsigned d = 0; d < n; d++)
        store->directories[d].slots_bytes = 0;
    for (uint64_t page = 0; page < layout->n_pages; page++) {
        uint64_t bytes =
            slot_bytes(layout, store->options.dtype, page) * store->options.slots_per_page;
        unsigned best = 0;
        for (unsigned d = 1; d < n; d++) {
            wide here = (wide)(store->directories[d].slots_bytes + bytes) * store->weights[best];
            wide there = (wide)(store->directories[best].slots_bytes + bytes) * store->weights[d];
            if (here < there)
                best = d;
        }
        store->page_directories[page] = (uint8_t)best;
        store->page_offsets[page] = store->directories[best].slots_bytes;
        store->directories[best].slots_bytes += bytes;
    }
}

struct tensor_shape {
    uint64_t layer, offset, rows, cols;
};

/* Shapes, and what else of the configuration determines what is computed. */
struct page_digest store_digest_model(const struct model_layout *layout)
{
    XXH3_state_t *state = XXH3_createState();
    CHECK(state != NULL && XXH3_128bits_reset(state) == XXH_OK);
    for (uint32_t i = 0; i < layout->n_tensors; i++) {
        const struct model_tensor *t = &layout->tensors[i];
        struct tensor_shape shape = {t->layer, t->offset, t->rows, t->cols};
        (void)XXH3_128bits_update(state, &shape, sizeof shape); /* fails only for NULL */
    }
    (void)XXH3_128bits_update(state, &layout->config, MODEL_CONFIG_COMPUTED_BYTES);
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    (void)XXH3_freeState(state);
    return (struct page_digest){hash.low64, hash.high64};
}

unsigned store_page_file(const struct store *store, uint64_t page)
{
    CHECK(page < store_n_pages(store));
    return store->page_directories[page];
}

void store_page_layout(const struct store *store, uint64_t page, struct page_image_layout *layout)
{
    CHECK(page < store_n_pages(store));
    page_image_layout(layout, store->options.dtype, store->options.layout->pages[page].elements);
}

uint64_t store_slot_offset(const struct store *store, uint64_t page, uint32_t slot)
{
    CHECK(page < store_n_pages(store) && slot < store->options.slots_per_page);
    return store->page_offsets[page] +
           slot * slot_bytes(store->options.layout, store->options.dtype, page);
}

void store_page_identity(const struct store *store, uint64_t page, uint64_t version,
                         struct page_identity *identity)
{
    CHECK(page < store_n_pages(store));
    memset(identity, 0, sizeof *identity);
    memcpy(identity->run, store->options.run, sizeof identity->run);
    identity->page = page;
    identity->version = version;
    identity->layer = store->options.layout->pages[page].layer;
}

void store_request_page(const struct store *store, struct io_request *request, enum io_op op,
                        uint64_t page, uint32_t slot)
{
    request->op = op;
    request->file = store_page_file(store, page);
    request->offset = store_slot_offset(store, page, slot);
}

static int refuse_entry(uint64_t page, const char *field, uint64_t expected, uint64_t found)
{
    return error_set(ERROR_FAILED, "entry %llu: %s: expected %llu, found %llu",
                     (unsigned long long)page, field, (unsigned long long)expected,
                     (unsigned long long)found);
}

static int check_entry_parts(const struct store *store, const struct page_entry *entry)
{
    const struct page_digest none = {0, 0};
    struct page_image_layout layout;
    char field[64];
    store_page_layout(store, entry->page, &layout);
    for (unsigned part = 0; part < PART_COUNT; part++) {
        uint64_t length = page_image_part_length(&layout, (enum page_codec)entry->codec, part);
        (void)snprintf(field, sizeof field, "length of %s", page_part_name(part));
        if (entry->length[part] != length)
            return refuse_entry(entry->page, field, length, entry->length[part]);
        if (length == 0 && !page_digest_equal(entry->digest[part], none))
            return error_set(ERROR_FAILED, "entry %llu: digest of no %s: expected zero",
                             (unsigned long long)entry->page, page_part_name(part));
    }
    return 0;
}

int store_check_entry(const struct store *store, const struct page_entry *entry, uint64_t page)
{
    if (!page_entry_valid(entry))
        return error_set(ERROR_FAILED, "entry %llu: its hash does not match",
                         (unsigned long long)page);
    if (entry->page != page)
        return refuse_entry(page, "page", page, entry->page);
    if (entry->layer != store->options.layout->pages[page].layer)
        return refuse_entry(page, "layer", store->options.layout->pages[page].layer, entry->layer);
    if (entry->slot >= store->options.slots_per_page)
        return refuse_entry(page, "slot below", store->options.slots_per_page, entry->slot);
    if (entry->codec != PAGE_ZERO && entry->codec != PAGE_RAW)
        return refuse_entry(page, "codec up to", PAGE_RAW, entry->codec);
    return check_entry_parts(store, entry);
}

int store_check_table(const struct store *store, const struct page_entry *table)
{
    for (uint64_t page = 0; page < store_n_pages(store); page++)
        if (store_check_entry(store, &table[page], page) < 0)
            return -ERROR_FAILED;
    return 0;
}

int store_verify_image(const struct store *store, const struct page_entry *entry, const void *image)
{
    struct page_image_layout layout;
    struct page_identity identity;
    store_page_layout(store, entry->page, &layout);
    store_page_identity(store, entry->page, entry->version, &identity);
    int rc = page_image_verify(image, &layout, &identity);
    const struct page_image_header *header = image;
    for (unsigned part = 0; rc == 0 && part < PART_COUNT; part++)
        if (!page_digest_equal(header->digest[part], entry->digest[part]))
            rc =
                error_set(ERROR_FAILED, "page: digest of %s differs from the commit's (lost write)",
                          page_part_name(part));
    if (rc < 0)
        return error_wrap("%s: offset %llu: page %llu (layer %u), slot %u",
                          store_file_path(store, store_page_file(store, entry->page)),
                          (unsigned long long)store_slot_offset(store, entry->page, entry->slot),
                          (unsigned long long)entry->page, entry->layer, entry->slot);
    return 0;
}
