#include "model/token_file.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "procs/error.h"

#define CRC_POLYNOMIAL 0xedb88320u

uint32_t token_file_checksum(const struct token_file_header *header)
{
    const uint8_t *bytes = (const uint8_t *)header;
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < offsetof(struct token_file_header, checksum); i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ CRC_POLYNOMIAL : crc >> 1;
    }
    return ~crc;
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
