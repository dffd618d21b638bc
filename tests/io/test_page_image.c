/* The image of a page: where its parts lie, and that no flipped bit of it goes unnoticed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "ipc/page_image.h"
#include "procs/error.h"

#include <stdlib.h>
#include <string.h>

static const enum dtype_mode dtypes[] = {DTYPE_FLOAT32, DTYPE_BFLOAT16};

static const struct page_identity identity = {
    .run = {1, 2, 3}, .page = 77, .version = 9, .layer = 4};

static void parts_are_aligned_disjoint_and_staggered(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {1, 4096, 3 * 4096, 4 << 20, 1 << 30};
    for (unsigned d = 0; d < 2; d++)
        for (unsigned s = 0; s < 5; s++) {
            struct page_image_layout l;
            page_image_layout(&l, dtypes[d], sizes[s]);
            assert_int_equal(l.offset[PART_WEIGHTS], 4096);
            assert_int_equal(l.bytes % 4096, 0);
            uint64_t end = 4096, sum = 0;
            for (unsigned p = 0; p < PART_COUNT; p++) {
                assert_int_equal(l.offset[p] % 64, 0);
                sum += l.capacity[p];
                if (l.capacity[p] == 0)
                    continue;
                assert_true(l.offset[p] >= end);
                end = l.offset[p] + l.capacity[p];
                for (unsigned q = 0; q < p; q++) /* 4 KiB aliasing */
                    assert_true(l.capacity[q] == 0 || (l.offset[p] - l.offset[q]) % 4096 != 0);
            }
            assert_true(end <= l.bytes && l.bytes - sum < 6 * 4096 + 4096);
            assert_int_equal(sum, 12 * sizes[s]);
            assert_int_equal(page_image_bytes(&l, PAGE_RAW), l.bytes);
            assert_true(page_image_bytes(&l, PAGE_ZERO) <= l.bytes);
            assert_true(page_image_weights_bytes(&l) >= 4096 + l.capacity[PART_WEIGHTS]);
        }
}

/* An image of 4096 elements with recognisable parts, sealed. The caller frees it. */
static unsigned char *sealed(struct page_image_layout *layout, enum dtype_mode dtype,
                             enum page_codec codec)
{
    void *memory = NULL;
    page_image_layout(layout, dtype, 4096);
    assert_int_equal(posix_memalign(&memory, 4096, layout->bytes), 0);
    unsigned char *image = memory;
    for (uint64_t i = 0; i < layout->bytes; i++)
        image[i] = (unsigned char)(1 + i * 2654435761u % 255); /* rubbish in the gaps, too */
    page_image_seal(image, layout, &identity, codec);
    return image;
}

static void a_sealed_image_verifies(void **state)
{
    (void)state;
    for (unsigned d = 0; d < 2; d++)
        for (enum page_codec codec = PAGE_ZERO; codec <= PAGE_RAW; codec++) {
            struct page_image_layout layout;
            unsigned char *image = sealed(&layout, dtypes[d], codec);
            assert_int_equal(page_image_verify(image, &layout, &identity), 0);
            const struct page_image_header *header = (const void *)image;
            assert_int_equal(header->length[PART_M], codec == PAGE_ZERO ? 0 : 4 * 4096);
            assert_int_equal(header->digest[PART_M].low == 0, codec == PAGE_ZERO);
            free(image);
        }
}

static void a_flipped_bit_anywhere_in_the_transfer_is_found(void **state)
{
    (void)state;
    for (unsigned d = 0; d < 2; d++) {
        struct page_image_layout layout;
        unsigned char *image = sealed(&layout, dtypes[d], PAGE_RAW);
        for (uint64_t at = 0; at < layout.bytes; at += at < 256 ? 1 : 509) {
            unsigned char bit = (unsigned char)(1u << (at % 8));
            image[at] ^= bit;
            assert_int_equal(page_image_verify(image, &layout, &identity), -ERROR_FAILED);
            image[at] ^= bit;
        }
        image[layout.bytes - 1] ^= 1;
        assert_int_equal(page_image_verify(image, &layout, &identity), -ERROR_FAILED);
        assert_non_null(strstr(error_text(), "between parts"));
        free(image);
    }
}

static void a_wrong_identity_is_named(void **state)
{
    (void)state;
    static const char *const names[] = {"run:", "page:", "version:", "layer:"};
    struct page_image_layout layout, other;
    unsigned char *image = sealed(&layout, DTYPE_FLOAT32, PAGE_RAW);
    for (unsigned i = 0; i < 4; i++) {
        struct page_identity wrong = identity;
        wrong.run[15] = i == 0;
        wrong.page += i == 1;
        wrong.version += i == 2;
        wrong.layer += i == 3;
        assert_int_equal(page_image_verify_header(image, &layout, &wrong), -ERROR_FAILED);
        assert_non_null(strstr(error_text(), names[i]));
        assert_non_null(strstr(error_text(), "expected"));
    }
    page_image_layout(&other, DTYPE_BFLOAT16, 4096);
    assert_int_equal(page_image_verify_header(image, &other, &identity), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "dtype"));
    page_image_layout(&other, DTYPE_FLOAT32, 8192);
    assert_int_equal(page_image_verify_header(image, &other, &identity), -ERROR_FAILED);
    assert_non_null(strstr(error_text(), "elements"));
    free(image);
}

static void the_same_content_gives_the_same_bytes(void **state)
{
    (void)state;
    struct page_image_layout layout;
    unsigned char *a = sealed(&layout, DTYPE_BFLOAT16, PAGE_RAW);
    unsigned char *b = sealed(&layout, DTYPE_BFLOAT16, PAGE_RAW);
    memset(b + 4096 + layout.capacity[PART_WEIGHTS], 0xee, 8); /* a gap */
    page_image_seal(b, &layout, &identity, PAGE_RAW);
    assert_memory_equal(a, b, layout.bytes);
    free(a);
    free(b);
}

static void a_digest_does_not_depend_on_the_pieces(void **state)
{
    (void)state;
    enum { BYTES = 3 * 4096 + 40 };
    static const uint64_t pieces[] = {1, 63, 64, 1000, 4096, BYTES};
    unsigned char bytes[BYTES];
    for (unsigned i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)(i * i >> 3);
    struct page_digest whole = page_image_digest(bytes, BYTES);
    for (unsigned i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        struct page_digest_so_far so_far;
        page_digest_begin(&so_far);
        for (uint64_t at = 0; at < BYTES; at += pieces[i])
            page_digest_add(&so_far, bytes + at, BYTES - at < pieces[i] ? BYTES - at : pieces[i]);
        assert_true(page_digest_equal(page_digest_end(&so_far), whole));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_aligned_disjoint_and_staggered),
        cmocka_unit_test(a_sealed_image_verifies),
        cmocka_unit_test(a_flipped_bit_anywhere_in_the_transfer_is_found),
        cmocka_unit_test(a_wrong_identity_is_named),
        cmocka_unit_test(the_same_content_gives_the_same_bytes),
        cmocka_unit_test(a_digest_does_not_depend_on_the_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
