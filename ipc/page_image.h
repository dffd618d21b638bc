/*
 * The image of one version of one page: the same bytes in a frame of shared memory and in a slot on
 * disk, so that one transfer moves a page and one verification serves both.
 *
 *     0        4096                                                            capacity
 *     | header | WEIGHTS            |gap| RESIDUAL  |gap| M          |gap| V          |gap|
 *
 *     float32   WEIGHTS = f32 master weights (they are the compute weights); no RESIDUAL
 *     bfloat16  WEIGHTS = high half (the compute weights), RESIDUAL = low 16 bits (model/split.h)
 *     M, V      f32 moments (codec RAW); in version 0 they are zero and have length 0 (codec ZERO)
 *
 * WEIGHTS begins at exactly 4096, so that header and weights can be read alone by direct I/O. The
 * other parts begin an odd number of cache lines past a 4 KiB boundary, each at another distance:
 * arrays at equal addresses modulo 4 KiB, walked side by side, run at a quarter of the speed.
 *
 * Who writes: opt_worker fills an OUT frame and seals it; io_worker seals version 0 on import and
 * moves images between frames and slots. A sealed image is never changed again.
 *
 * What protects what: the header's own hash covers its 4096 bytes; identity fields (run, layer,
 * page) catch a misdirected write, `version` a stale one, the part digests a torn or flipped one,
 * and gaps must be zero, so that no byte of a transfer is outside a check. A write that was lost
 * altogether is caught only by comparing the part digests with those of the commit's table
 * (io_worker/commit.h).
 */
#ifndef IPC_PAGE_IMAGE_H
#define IPC_PAGE_IMAGE_H

#include <stdint.h>

enum dtype_mode {
    DTYPE_FLOAT32 = 1,  /* compute weights are the f32 master weights */
    DTYPE_BFLOAT16 = 2, /* master weights are split into two halves of 16 bits */
};

/* How M and V are encoded. Weights are always raw. */
enum page_codec {
    PAGE_ZERO = 1, /* all zero, length 0: version 0 */
    PAGE_RAW = 2,  /* f32, little endian */
};

enum page_part { PART_WEIGHTS, PART_RESIDUAL, PART_M, PART_V, PART_COUNT };

enum {
    PAGE_IMAGE_HEADER_BYTES = 4096,
    PAGE_IMAGE_LAYOUT_VERSION = 1,
    RUN_UUID_BYTES = 16,
};

/* xxh3-128 of some bytes. */
struct page_digest {
    uint64_t low;
    uint64_t high;
};

/* Where the parts lie. A function of (dtype, elements) alone, so every process computes the same.
 */
struct page_image_layout {
    uint64_t elements;
    uint64_t offset[PART_COUNT];   /* bytes from the image's start; 64-byte aligned */
    uint64_t capacity[PART_COUNT]; /* raw bytes of the part; 0: the dtype has no such part */
    uint64_t bytes;                /* capacity of frame and slot, a multiple of 4096 */
    enum dtype_mode dtype;
};

/* Which page of which run, in which version. `page` counts over the whole model, in (layer, page)
 * order: the index into model_layout's pages. */
struct page_identity {
    uint8_t run[RUN_UUID_BYTES];
    uint64_t page;
    uint64_t version; /* the step that last changed the page; 0: imported */
    uint32_t layer;
};

struct page_image_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t dtype; /* enum dtype_mode */
    uint8_t run[RUN_UUID_BYTES];
    uint64_t page;
    uint64_t version;
    uint32_t layer;
    uint32_t codec;              /* enum page_codec */
    uint64_t elements;           /* of the page */
    uint64_t length[PART_COUNT]; /* encoded bytes */
    uint64_t offset[PART_COUNT];
    struct page_digest digest[PART_COUNT]; /* of the encoded bytes; of length 0: zero */
    uint64_t header_hash;                  /* xxh3-64 of the 4096 bytes, this field taken as zero */
};
_Static_assert(sizeof(struct page_image_header) == 200, "no hidden padding in a durable struct");

/* Fills `layout` for a page of `elements` elements. */
void page_image_layout(struct page_image_layout *layout, enum dtype_mode dtype, uint64_t elements);

/* Address of a part inside an image. */
static inline void *page_image_part(void *image, const struct page_image_layout *layout,
                                    enum page_part part)
{
    return (unsigned char *)image + layout->offset[part];
}

/* Encoded bytes of a part under a codec. */
uint64_t page_image_part_length(const struct page_image_layout *layout, enum page_codec codec,
                                enum page_part part);

/* Bytes of an image to transfer under a codec: up to the end of its last part, a multiple of 4096.
 */
uint64_t page_image_bytes(const struct page_image_layout *layout, enum page_codec codec);

/* Bytes that hold header and WEIGHTS, a multiple of 4096 (the tail belongs to the next part). */
uint64_t page_image_weights_bytes(const struct page_image_layout *layout);

/* xxh3-128 of `bytes` bytes; zero for none. */
struct page_digest page_image_digest(const void *data, uint64_t bytes);

/*
 * The same of bytes that come piece by piece: whoever copies or computes with a page hashes each
 * piece while it is in the cache, instead of fetching the page from memory a second time.
 *
 *     page_digest_begin(&so_far);
 *     for each piece:  page_digest_add(&so_far, piece, bytes);
 *     page_digest_end(&so_far)   == page_image_digest(all, all bytes), all bytes > 0
 */
struct page_digest_so_far {
    _Alignas(64) unsigned char state[576]; /* XXH3_state_t; nothing to release */
};
void page_digest_begin(struct page_digest_so_far *so_far);
void page_digest_add(struct page_digest_so_far *so_far, const void *data, uint64_t bytes);
struct page_digest page_digest_end(const struct page_digest_so_far *so_far);

static inline int page_digest_equal(struct page_digest a, struct page_digest b)
{
    return a.low == b.low && a.high == b.high;
}

/* Writes `identity`, lengths, digests and hash into the header and zeroes the gaps of an image
 * whose parts are in place. `image` holds page_image_bytes() bytes, 64-byte aligned. Reads every
 * byte of the parts once (that is the cost). */
void page_image_seal(void *image, const struct page_image_layout *layout,
                     const struct page_identity *identity, enum page_codec codec);

/* Checks the header against what is expected, every field, without looking at the parts. 0, or
 * ERROR_FAILED naming the field with expected and found. `identity.version` is checked exactly. */
int page_image_verify_header(const void *image, const struct page_image_layout *layout,
                             const struct page_identity *identity);

/* page_image_verify_header(), then digests of all parts and zero gaps. */
int page_image_verify(const void *image, const struct page_image_layout *layout,
                      const struct page_identity *identity);

/* "weights", "residual", "first moment", "second moment". */
const char *page_part_name(enum page_part part);

#endif
