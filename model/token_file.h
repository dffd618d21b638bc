/*
 * A token file: one source, tokenized, with what is learned of it. tools/tokenizer writes it
 * (token_file.py), the launcher sees whether it still holds, io_worker reads it as training data.
 *
 *      header    512 bytes, below
 *      words     one little-endian u32 per token:
 *
 *                    bits 0 to 29   id
 *                    bit 30         MASKED: not learned, never a label (a prompt, a user's turn)
 *                    bit 31         END: the last token of its document
 *
 * That is the whole representation of loss masks and documents: it lies beside the id, so that any
 * part of the file can be read by itself. A document may contain the id that ends documents (a chat
 * template ends every turn with it), which is why END is not told by the id. The first token of a
 * document is never a label, MASKED or not; the last word of a file has END.
 *
 * A file is written under NAME.tmp (locked), flushed, and renamed: NAME is whole or absent. A
 * header without its magic, of another version, with a wrong checksum or a size that the file has
 * not is no token file.
 */
#ifndef MODEL_TOKEN_FILE_H
#define MODEL_TOKEN_FILE_H

#include <stddef.h>
#include <stdint.h>

#define TOKEN_FILE_MAGIC        "MTTOKENS"
#define TOKEN_FILE_SUFFIX       ".mttokens"
#define TOKEN_FILE_ID           0x3fffffffu
#define TOKEN_FILE_MASKED       0x40000000u
#define TOKEN_FILE_END          0x80000000u
#define TOKEN_FILE_HEADER_BYTES 512u
#define TOKEN_FILE_WORD_BYTES   4u

enum { TOKEN_FILE_VERSION = 2, TOKEN_FILE_KEY_BYTES = 16 };

enum token_file_kind {
    TOKEN_FILE_TEXT = 1,        /* documents may be cut: what is learned stands everywhere */
    TOKEN_FILE_INSTRUCTION = 2, /* a document is a conversation and is never cut in two */
};

struct token_file_header {
    char magic[8];
    uint32_t version;
    uint32_t kind; /* enum token_file_kind */
    uint64_t tokens;
    uint64_t documents;
    uint64_t labels;     /* tokens that are learned */
    uint64_t skipped;    /* blank lines and empty records */
    uint64_t unlabelled; /* conversations of which nothing is learned, left out */
    uint64_t token_max;  /* largest id */
    uint64_t scanned_ns; /* CLOCK_REALTIME at which the source was read */
    uint64_t device, inode, size, mtime_ns, ctime_ns; /* of the source then */
    uint8_t key[TOKEN_FILE_KEY_BYTES]; /* what decides the words besides the source */
    uint8_t source_hash[32];           /* BLAKE2b of the source's bytes */
    char made_by[32];                  /* "tokenizers 0.23.3" */
    char taken_as[24];                 /* what the records were: "messages", "text", ... */
    char source[288];                  /* for people: cut at the front if longer */
    uint32_t words_checksum;           /* CRC-32 of the words */
    uint32_t checksum;                 /* CRC-32 of all before */
};

_Static_assert(sizeof(struct token_file_header) == TOKEN_FILE_HEADER_BYTES, "on-disk layout");

/* CRC-32 as zlib's (IEEE 802.3, reflected) of the header but for its checksum. */
uint32_t token_file_checksum(const struct token_file_header *header);

/* CRC-32 as zlib's of bytes that follow others whose CRC is `crc` (0: they are the first). */
uint32_t token_file_crc(uint32_t crc, const void *bytes, size_t n);

/* Is it a header of a token file of `file_bytes`? 0, or -ERROR_USER: what was expected and found
 * (the caller puts the path in front). Texts in it are terminated from then on. */
int token_file_check(struct token_file_header *header, uint64_t file_bytes);

/* Reads and checks the header of the file at path: 1 whole, 0 absent or none. */
int token_file_load(const char *path, struct token_file_header *header);

#endif
