/*
 * One line of a .jsonl file of documents: {"text": "..."}; other keys are ignored.
 */
#ifndef MODEL_JSONL_H
#define MODEL_JSONL_H

#include <stddef.h>

/* Longest line that is read. A document longer than this belongs into several lines, or a .txt. */
#define JSONL_LINE_BYTES_MAX ((size_t)64 << 20)

struct jsonl_text;

/*
 * Parses line (n bytes, without its newline, checked to be UTF-8). On success *document owns the
 * decoded text, which jsonl_text_bytes() names until jsonl_text_free(). -ERROR_USER: not JSON (with
 * the column), not an object, a duplicate key, no "text" (naming the keys that there are), or not a
 * string. NUL characters (\u0000) are kept.
 */
int jsonl_text_parse(const char *line, size_t n, struct jsonl_text **document);

/* 0 if the line is one whole JSON object without duplicate keys, else -ERROR_USER with the column.
 */
int jsonl_object_check(const char *line, size_t n);

const char *jsonl_text_bytes(const struct jsonl_text *document, size_t *n);

void jsonl_text_free(struct jsonl_text *document);

#endif
