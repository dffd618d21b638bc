/*
 * JSON for the files of this folder only: reading a whole small file, and saying what was found.
 */
#ifndef MODEL_JSON_H
#define MODEL_JSON_H

#include <jansson.h>
#include <stdint.h>

/*
 * What a text may hold at most: jansson takes up to about 250 bytes for two bytes of text ("{}").
 * A tokenizer.json of 262144 tokens has two million values, a header of 262144 tensors fewer than
 * four.
 */
enum { MODEL_JSON_VALUES_MAX = 1 << 22 };

/*
 * Parses an object; duplicate keys, trailing text and more than MODEL_JSON_VALUES_MAX values are
 * errors. `where` names the text in messages
 * (where:line:column). The result is released with json_decref().
 */
int model_json_parse(json_t **root, const char *text, uint64_t bytes, const char *where);

/* The same from a file of at most bytes_max. */
int model_json_load(json_t **root, const char *path, uint64_t bytes_max);

/* The same from a file of the model's folder (model/folder_file.h). 1: parsed, 0: absent (no error
 * set), negative: an error. */
int model_json_load_in(json_t **root, const char *folder, const char *name, uint64_t bytes_max);

enum { MODEL_JSON_TEXT_BYTES = 96 };

/* The value as JSON text, cut to fit; returns `text`. For "found ..." in messages. */
const char *model_json_text(const json_t *value, char text[MODEL_JSON_TEXT_BYTES]);

#endif
