#include "ipc/page_image.h"

#include "procs/check.h"
#include "procs/error.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* for the size of a state */
#include <xxhash.h>

#define PAGE_IMAGE_MAGIC 0x3145474150434d4dull /* "MMCPAGE1" in memory */

enum {
    SECTOR_BYTES = 4096,
    STAGGER_BYTES = 17 * 64, /* an odd number of cache lines */
};

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

const char *page_part_name(enum page_part part)
{
    static const char *const names[PART_COUNT] = {"weights", "residual", "first moment",
                                                  "second moment"};
    return names[part];
}

void page_image_layout(struct page_image_layout *layout, enum dtype_mode dtype, uint64_t elements)
{
    CHECK(dtype == DTYPE_FLOAT32 || dtype == DTYPE_BFLOAT16);
    CHECK(elements > 0);
    const int split = dtype == DTYPE_BFLOAT16;
    const uint64_t bytes_per_element[PART_COUNT] = {split ? 2 : 4, split ? 2 : 0, 4, 4};
    memset(layout, 0, sizeof *layout);
    layout->dtype = dtype;
    layout->elements = elements;
    uint64_t end = PAGE_IMAGE_HEADER_BYTES;
    for (unsigned part = 0; part < PART_COUNT; part++) {
        layout->capacity[part] = elements * bytes_per_element[part];
        layout->offset[part] = round_up(end, SECTOR_BYTES) + part * STAGGER_BYTES;
        if (layout->capacity[part] > 0)
            end = layout->offset[part] + layout->capacity[part];
    }
    layout->bytes = round_up(end, SECTOR_BYTES);
}

uint64_t page_image_part_length(const struct page_image_layout *layout, enum page_codec codec,
                                enum page_part part)
{
    const int moment = part == PART_M || part == PART_V;
    return moment && codec == PAGE_ZERO ? 0 : layout->capacity[part];
}

static uint64_t parts_end(const struct page_image_layout *layout, enum page_codec codec)
{
    uint64_t end = PAGE_IMAGE_HEADER_BYTES;
    for (unsigned part = 0; part < PART_COUNT; part++) {
        uint64_t length = page_image_part_length(layout, codec, part);
        if (length > 0)
            end = layout->offset[part] + length;
    }
    return end;
}

uint64_t page_image_bytes(const struct page_image_layout *layout, enum page_codec codec)
{
    return round_up(parts_end(layout, codec), SECTOR_BYTES);
}

uint64_t page_image_weights_bytes(const struct page_image_layout *layout)
{
    return round_up(PAGE_IMAGE_HEADER_BYTES + layout->capacity[PART_WEIGHTS], SECTOR_BYTES);
}

struct page_digest page_image_digest(const void *data, uint64_t bytes)
{
    if (bytes == 0)
        return (struct page_digest){0, 0};
    XXH128_hash_t hash = XXH3_128bits(data, bytes);
    return (struct page_digest){hash.low64, hash.high64};
}

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct page_digest_so_far), "the state fits");

void page_digest_begin(struct page_digest_so_far *so_far)
{
    CHECK(XXH3_128bits_reset((XXH3_state_t *)(void *)so_far->state) == XXH_OK);
}

void page_digest_add(struct page_digest_so_far *so_far, const void *data, uint64_t bytes)
{
    CHECK(XXH3_128bits_update((XXH3_state_t *)(void *)so_far->state, data, bytes) == XXH_OK);
}

struct page_digest page_digest_end(const struct page_digest_so_far *so_far)
{
    XXH128_hash_t hash = XXH3_128bits_digest((const XXH3_state_t *)(const void *)so_far->state);
    return (struct page_digest){hash.low64, hash.high64};
}

/* Hash of the 4096 header bytes with header_hash taken as zero. */
static uint64_t header_hash(const void *image)
{
    unsigned char copy[PAGE_IMAGE_HEADER_BYTES];
    memcpy(copy, image, sizeof copy);
    memset(copy + offsetof(struct page_image_header, header_hash), 0, sizeof(uint64_t));
    return XXH3_64bits(copy, sizeof copy);
}

struct gap {
    uint64_t offset;
    uint64_t bytes;
};

/* The bytes of the transfer that belong to no part, in order. */
static unsigned list_gaps(const struct page_image_layout *layout, enum page_codec codec,
                          struct gap gaps[PART_COUNT + 1])
{
    unsigned n = 0;
    uint64_t from = PAGE_IMAGE_HEADER_BYTES;
    for (unsigned part = 0; part < PART_COUNT; part++) {
        uint64_t length = page_image_part_length(layout, codec, part);
        if (length == 0)
            continue;
        gaps[n++] = (struct gap){from, layout->offset[part] - from};
        from = layout->offset[part] + length;
    }
    gaps[n++] = (struct gap){from, page_image_bytes(layout, codec) - from};
    return n;
}

void page_image_seal(void *image, const struct page_image_layout *layout,
                     const struct page_identity *identity, enum page_codec codec)
{
    CHECK(codec == PAGE_ZERO || codec == PAGE_RAW);
    unsigned char *bytes = image;
    struct gap gaps[PART_COUNT + 1];
    unsigned n_gaps = list_gaps(layout, codec, gaps);
    for (unsigned i = 0; i < n_gaps; i++)
        memset(bytes + gaps[i].offset, 0, gaps[i].bytes);

    struct page_image_header header = {.magic = PAGE_IMAGE_MAGIC,
                                       .layout_version = PAGE_IMAGE_LAYOUT_VERSION,
                                       .dtype = layout->dtype,
                                       .page = identity->page,
                                       .version = identity->version,
                                       .layer = identity->layer,
                                       .codec = codec,
                                       .elements = layout->elements};
    memcpy(header.run, identity->run, sizeof header.run);
    for (unsigned part = 0; part < PART_COUNT; part++) {
        header.length[part] = page_image_part_length(layout, codec, part);
        header.offset[part] = layout->offset[part];
        header.digest[part] = page_image_digest(bytes + layout->offset[part], header.length[part]);
    }
    memset(image, 0, PAGE_IMAGE_HEADER_BYTES);
    memcpy(image, &header, sizeof header);
    header.header_hash = header_hash(image);
    memcpy(image, &header, sizeof header);
}

static int expect_field(const char *field, uint64_t expected, uint64_t found)
{
    if (expected == found)
        return 0;
    return error_set(ERROR_FAILED, "page header: %s: expected %llu, found %llu", field,
                     (unsigned long long)expected, (unsigned long long)found);
}

static void run_format(const uint8_t run[RUN_UUID_BYTES], char text[2 * RUN_UUID_BYTES + 1])
{
    for (unsigned i = 0; i < RUN_UUID_BYTES; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", run[i]);
}

static int expect_run(const uint8_t expected[RUN_UUID_BYTES], const uint8_t found[RUN_UUID_BYTES])
{
    if (memcmp(expected, found, RUN_UUID_BYTES) == 0)
        return 0;
    char want[2 * RUN_UUID_BYTES + 1], have[2 * RUN_UUID_BYTES + 1];
    run_format(expected, want);
    run_format(found, have);
    return error_set(ERROR_FAILED, "page header: run: expected %s, found %s", want, have);
}

static int verify_parts_described(const struct page_image_header *header,
                                  const struct page_image_layout *layout)
{
    char field[64];
    for (unsigned part = 0; part < PART_COUNT; part++) {
        uint64_t length = page_image_part_length(layout, header->codec, part);
        (void)snprintf(field, sizeof field, "length of %s", page_part_name(part));
        if (expect_field(field, length, header->length[part]) < 0)
            return -ERROR_FAILED;
        (void)snprintf(field, sizeof field, "offset of %s", page_part_name(part));
        if (expect_field(field, layout->offset[part], header->offset[part]) < 0)
            return -ERROR_FAILED;
    }
    return 0;
}

int page_image_verify_header(const void *image, const struct page_image_layout *layout,
                             const struct page_identity *identity)
{
    struct page_image_header header;
    memcpy(&header, image, sizeof header);
    if (expect_field("magic", PAGE_IMAGE_MAGIC, header.magic) < 0 ||
        expect_field("layout version", PAGE_IMAGE_LAYOUT_VERSION, header.layout_version) < 0 ||
        expect_field("hash", header_hash(image), header.header_hash) < 0 ||
        expect_run(identity->run, header.run) < 0 ||
        expect_field("layer", identity->layer, header.layer) < 0 ||
        expect_field("page", identity->page, header.page) < 0 ||
        expect_field("version", identity->version, header.version) < 0 ||
        expect_field("dtype", layout->dtype, header.dtype) < 0 ||
        expect_field("elements", layout->elements, header.elements) < 0)
        return -ERROR_FAILED;
    if (header.codec != PAGE_ZERO && header.codec != PAGE_RAW)
        return error_set(ERROR_FAILED, "page header: codec: expected %d or %d, found %u", PAGE_ZERO,
                         PAGE_RAW, header.codec);
    return verify_parts_described(&header, layout);
}

static int verify_gaps(const unsigned char *bytes, const struct page_image_layout *layout,
                       enum page_codec codec)
{
    struct gap gaps[PART_COUNT + 1];
    unsigned n_gaps = list_gaps(layout, codec, gaps);
    for (unsigned i = 0; i < n_gaps; i++)
        for (uint64_t at = gaps[i].offset; at < gaps[i].offset + gaps[i].bytes; at++)
            if (bytes[at] != 0)
                return error_set(ERROR_FAILED,
                                 "page: byte %llu between parts: expected 0, found %u",
                                 (unsigned long long)at, bytes[at]);
    return 0;
}

int page_image_verify(const void *image, const struct page_image_layout *layout,
                      const struct page_identity *identity)
{
    if (page_image_verify_header(image, layout, identity) < 0)
        return -ERROR_FAILED;
    const unsigned char *bytes = image;
    struct page_image_header header;
    memcpy(&header, image, sizeof header);
    for (unsigned part = 0; part < PART_COUNT; part++) {
        struct page_digest found =
            page_image_digest(bytes + header.offset[part], header.length[part]);
        if (!page_digest_equal(found, header.digest[part]))
            return error_set(ERROR_FAILED,
                             "page: digest of %s (%llu bytes at %llu): expected %016llx%016llx, "
                             "found %016llx%016llx",
                             page_part_name(part), (unsigned long long)header.length[part],
                             (unsigned long long)header.offset[part],
                             (unsigned long long)header.digest[part].high,
                             (unsigned long long)header.digest[part].low,
                             (unsigned long long)found.high, (unsigned long long)found.low);
    }
    return verify_gaps(bytes, layout, header.codec);
}
