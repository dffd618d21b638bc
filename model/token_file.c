#include "model/token_file.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "procs/error.h"

#define CRC_POLYNOMIAL 0xedb88320u

enum { CRC_SLICES = 8 };

/* table[k][b]: what byte b does to the CRC from k bytes further on. */
static uint32_t crc_table[CRC_SLICES][256];

static void fill_crc_table(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ CRC_POLYNOMIAL : crc >> 1;
        crc_table[0][b] = crc;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < CRC_SLICES; k++)
            crc_table[k][b] = crc_table[k - 1][b] >> 8 ^ crc_table[0][crc_table[k - 1][b] & 0xff];
}

/* Eight bytes at a time: a token file is read whole ("slicing-by-8", Kounavis and Berry 2005). */
uint32_t token_file_crc(uint32_t crc, const void *bytes, size_t n)
{
    const uint8_t *b = bytes;
    if (crc_table[0][1] == 0)
        fill_crc_table();
    crc = ~crc;
    for (; n >= CRC_SLICES; n -= CRC_SLICES, b += CRC_SLICES) {
        uint8_t eight[CRC_SLICES];
        uint32_t next = 0;
        memcpy(eight, b, sizeof eight);
        for (int k = 0; k < 4; k++)
            eight[k] ^= (uint8_t)(crc >> 8 * k);
        for (int k = 0; k < CRC_SLICES; k++)
            next ^= crc_table[CRC_SLICES - 1 - k][eight[k]];
        crc = next;
    }
    while (n-- > 0)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *b++) & 0xff];
    return ~crc;
}

uint32_t token_file_checksum(const struct token_file_header *header)
{
    return token_file_crc(0, header, offsetof(struct token_file_header, checksum));
}

/* Sizes are compared by division, so that no product overflows. */
static int check_size(const struct token_file_header *h, uint64_t file_bytes)
{
    uint64_t body = file_bytes - TOKEN_FILE_HEADER_BYTES;
    if (body % TOKEN_FILE_WORD_BYTES == 0 && h->tokens == body / TOKEN_FILE_WORD_BYTES)
        return 0;
    return error_set(ERROR_USER,
                     "the header says %" PRIu64 " tokens of %u bytes behind %u bytes of header, "
                     "the file has %" PRIu64 " bytes",
                     h->tokens, TOKEN_FILE_WORD_BYTES, TOKEN_FILE_HEADER_BYTES, file_bytes);
}

static int check_counts(const struct token_file_header *h)
{
    if (h->kind != TOKEN_FILE_TEXT && h->kind != TOKEN_FILE_INSTRUCTION)
        return error_set(ERROR_USER, "kind: expected %d or %d, found %u", TOKEN_FILE_TEXT,
                         TOKEN_FILE_INSTRUCTION, h->kind);
    if (h->documents == 0 || h->documents > h->tokens || h->labels > h->tokens)
        return error_set(ERROR_USER,
                         "expected 1 to %" PRIu64 " documents and at most as many labels, found "
                         "%" PRIu64 " and %" PRIu64,
                         h->tokens, h->documents, h->labels);
    return 0;
}

int token_file_check(struct token_file_header *h, uint64_t file_bytes)
{
    if (file_bytes < sizeof *h || memcmp(h->magic, TOKEN_FILE_MAGIC, sizeof h->magic) != 0)
        return error_set(ERROR_USER, "expected a token file (it begins with %s)", TOKEN_FILE_MAGIC);
    if (h->version != TOKEN_FILE_VERSION)
        return error_set(ERROR_USER, "expected a token file of version %d, found %u",
                         TOKEN_FILE_VERSION, h->version);
    uint32_t checksum = token_file_checksum(h);
    if (h->checksum != checksum)
        return error_set(ERROR_USER, "checksum of the header: expected %08x, found %08x", checksum,
                         h->checksum);
    h->made_by[sizeof h->made_by - 1] = '\0';
    h->taken_as[sizeof h->taken_as - 1] = '\0';
    h->source[sizeof h->source - 1] = '\0';
    return check_size(h, file_bytes) < 0 ? -(int)error_kind_now() : check_counts(h);
}

int token_file_load(const char *path, struct token_file_header *header)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return 0;
    ssize_t n = pread(fd, header, sizeof *header, 0);
    int found = n == (ssize_t)sizeof *header && fstat(fd, &status) == 0 &&
                token_file_check(header, (uint64_t)status.st_size) == 0;
    (void)close(fd); /* nothing was written */
    return found;
}
