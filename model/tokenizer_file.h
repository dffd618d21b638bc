/*
 * A tokenizer.json of the Hugging Face `tokenizers` library, as far as this program reads it: which
 * ids it can make. (Tokenizing with it is tools/tokenizer's.)
 */
#ifndef MODEL_TOKENIZER_FILE_H
#define MODEL_TOKENIZER_FILE_H

#include <stdint.h>

/*
 * Is every id of the file (model.vocab, an object {token: id} or a list [[token, score], ...], and
 * added_tokens) below vocab_size? 0, or -ERROR_USER: it cannot be read, is no tokenizer.json, or
 * has an id that the model has no row for, which is named. A model with more rows than ids is fine:
 * many are padded.
 */
int tokenizer_file_check(const char *path, uint64_t vocab_size);

#endif
