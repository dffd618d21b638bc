/*
 * The slot decoder: what a slot or a frame holds, taken for a page's image (ipc/page_image.h).
 *
 *     | flags | elements | codec | changes ... |
 *
 * A good image is damaged by the changes, and its digests and header hash are made right again
 * where the flags say so. The oracle is exact: an image is accepted if and only if sealing the same
 * parts for the expected identity gives the same bytes (the header's reserved bytes, which only the
 * hash covers, aside).
 */
#include <xxhash.h>

#include "ipc/page_image.h"
#include "tests/fuzz/fuzz.h"

enum { HEAD_BYTES = 3, ELEMENTS_MAX = 48, IMAGE_BYTES_MAX = 32768 };

enum flag {
    FLAG_BFLOAT16 = 1,
    FLAG_DIGESTS = 2,     /* digests are recomputed after the changes */
    FLAG_HEADER_HASH = 4, /* the header's hash is recomputed last */
};

enum change { CHANGE_HEADER, CHANGE_BODY, CHANGE_XOR, CHANGE_COUNT };

static const struct page_identity wanted = {
    .run = {0xab, 0xcd, 1}, .page = 7, .version = 3, .layer = 2};

static _Alignas(64) uint8_t image[IMAGE_BYTES_MAX], sealed[IMAGE_BYTES_MAX];

static void fix_digests(const struct page_image_layout *layout)
{
    struct page_image_header header;
    memcpy(&header, image, sizeof header);
    for (unsigned part = 0; part < PART_COUNT; part++)
        if (header.offset[part] <= layout->bytes &&
            header.length[part] <= layout->bytes - header.offset[part])
            header.digest[part] =
                page_image_digest(image + header.offset[part], header.length[part]);
    memcpy(image, &header, sizeof header);
}

static void fix_header_hash(void)
{
    const uint64_t none = 0;
    uint8_t *at = image + offsetof(struct page_image_header, header_hash);
    memcpy(at, &none, sizeof none);
    uint64_t hash = XXH3_64bits(image, PAGE_IMAGE_HEADER_BYTES);
    memcpy(at, &hash, sizeof hash);
}

static void change(struct fuzz_input *in, const struct page_image_layout *layout)
{
    struct fuzz_op op;
    for (int i = 0; i < FUZZ_OPS_MAX && fuzz_next_op(in, &op); i++)
        switch (op.what % CHANGE_COUNT) {
        case CHANGE_HEADER:
            fuzz_op_write(&op, image, sizeof(struct page_image_header),
                          op.at % sizeof(struct page_image_header));
            break;
        case CHANGE_BODY:
            fuzz_op_write(&op, image, layout->bytes, op.at % layout->bytes);
            break;
        default:
            image[op.at % layout->bytes] ^= op.value[0];
        }
}

static int same_as_sealed(const struct page_image_layout *layout)
{
    struct page_image_header header;
    memcpy(&header, image, sizeof header);
    if (header.codec != PAGE_ZERO && header.codec != PAGE_RAW)
        return 0;
    enum page_codec codec = (enum page_codec)header.codec;
    memcpy(sealed, image, sizeof sealed);
    page_image_seal(sealed, layout, &wanted, codec);
    struct page_image_header *again = (struct page_image_header *)(void *)sealed;
    size_t reserved = sizeof header, rest = PAGE_IMAGE_HEADER_BYTES;
    int zero = 1;
    for (size_t i = reserved; i < rest; i++)
        zero &= image[i] == 0;
    if (!zero) { /* covered by the hash alone */
        uint64_t found = header.header_hash;
        fix_header_hash();
        memcpy(&again->header_hash, image + offsetof(struct page_image_header, header_hash), 8);
        memcpy(image, &header, sizeof header);
        if (found != again->header_hash)
            return 0;
    }
    return memcmp(sealed, image, sizeof header) == 0 &&
           memcmp(sealed + rest, image + rest, page_image_bytes(layout, codec) - rest) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct page_image_layout layout;
    uint8_t flags = fuzz_u8(&in);
    uint64_t elements = 1 + fuzz_u8(&in) % ELEMENTS_MAX;
    enum page_codec codec = fuzz_u8(&in) & 1 ? PAGE_RAW : PAGE_ZERO;
    page_image_layout(&layout, flags & FLAG_BFLOAT16 ? DTYPE_BFLOAT16 : DTYPE_FLOAT32, elements);
    REQUIRE(layout.bytes <= sizeof image && page_image_bytes(&layout, codec) <= layout.bytes);
    for (size_t i = 0; i < sizeof image; i++)
        image[i] = (uint8_t)(i * 7 + 1);
    page_image_seal(image, &layout, &wanted, codec);
    REQUIRE(page_image_verify(image, &layout, &wanted) == 0);
    change(&in, &layout);
    if (flags & FLAG_DIGESTS)
        fix_digests(&layout);
    if (flags & FLAG_HEADER_HASH)
        fix_header_hash();
    error_clear();
    int rc = page_image_verify(image, &layout, &wanted);
    REQUIRE((rc == 0) == same_as_sealed(&layout));
    int header_rc = page_image_verify_header(image, &layout, &wanted);
    REQUIRE(rc < 0 || header_rc == 0);
    if (rc < 0)
        fuzz_refused(rc, FUZZ_FAILED);
    return 0;
}

#define FIELD(field)                                                                               \
    {                                                                                              \
        CHANGE_HEADER, offsetof(struct page_image_header, field),                                  \
            sizeof((struct page_image_header *)0)->field > 8                                       \
                ? 8                                                                                \
                : sizeof((struct page_image_header *)0)->field                                     \
    }

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const struct fuzz_place places[] = {
        FIELD(magic),
        FIELD(layout_version),
        FIELD(dtype),
        FIELD(run),
        FIELD(page),
        FIELD(version),
        FIELD(layer),
        FIELD(codec),
        FIELD(elements),
        FIELD(length[0]),
        FIELD(length[1]),
        FIELD(length[2]),
        FIELD(length[3]),
        FIELD(offset[0]),
        FIELD(offset[1]),
        FIELD(offset[2]),
        FIELD(offset[3]),
        FIELD(digest[0].low),
        FIELD(digest[2]),
        FIELD(digest[3].high),
        FIELD(codec),
        {CHANGE_BODY, 4096, 8},
        {CHANGE_BODY, 4200, 8},
        {CHANGE_XOR, 300, 1},
        {CHANGE_XOR, 8192, 1},
    };
    uint64_t random = seed;
    size = fuzz_mutate_ops(data, size, max_size, HEAD_BYTES, &random, places,
                           sizeof places / sizeof places[0]);
    if (size >= 1 && fuzz_below(&random, 4) != 0)
        data[0] |= FLAG_HEADER_HASH;
    return size;
}
