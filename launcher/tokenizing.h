/*
 * Text becomes token files before any worker starts: what the run file names as text, .jsonl or
 * .parquet is tokenized once by tools/tokenizer into the cache, and the plan names the token files
 * (model/token_file.h) in its place. With tokenizer = "bytes" there is nothing to do: io_worker
 * reads text itself.
 *
 * A token file is called
 *
 *     <cache>/<name of the source>-<hash of its absolute path>-<key>.mttokens
 *
 * and holds as long as its header has the key (the contents of the tokenizer's files and of the
 * pinned package list, data.format, the token that ends a document) and the source is certainly the
 * file that was read: same inode, size and times. Then neither the source nor Python is touched.
 * Everything else is for the child to decide, which compares hashes.
 */
#ifndef LAUNCHER_TOKENIZING_H
#define LAUNCHER_TOKENIZING_H

#include "launcher/launcher.h"

/*
 * Fills l->tokenized from l->config; l->layout is loaded, signals and progress are open. `kept`: a
 * cache in which token files are looked for, too, but none is written; or NULL. 0; ERROR_USER: no
 * tokenizer.json, no environment (with the command that makes it), what the child found wrong with
 * the data; ERROR_FIT: the cache's disk is full; ERROR_STOPPED after a signal; ERROR_FAILED.
 */
int tokenizing_run(struct launcher *l, const char *kept);

/* The cache of a configuration: data.cache_dir, or what it stands for when it is empty. */
void tokenizing_cache(const struct config *config, char out[LAUNCHER_PATH_BYTES]);

/* The tokenizer.json of a configuration that has no byte tokenizer. ERROR_USER: there is none. */
int tokenizing_find_tokenizer(const struct config *config, char out[LAUNCHER_PATH_BYTES]);

/* One line per text source, "text: what came of it", to stdout. */
void tokenizing_print(const struct launcher *l);

/* A zeroed struct is fine. */
void tokenizing_close(struct launcher *l);

#endif
