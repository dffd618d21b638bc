/*
 * Files in cache_dir: what is known about a source so that a later start need not read it again.
 *
 *      header (512 bytes: what the source was, what came of it, a checksum)
 *      body   tokens of a tokenized text, entries of a document index, or nothing (a scanned shard)
 *      checks of the body, or of the shard's tokens (data_checks.h)
 *
 * A file is written under NAME.tmp, flushed, and renamed; so NAME is whole or absent, and an
 * interrupted tokenization is done again. NAME.tmp is locked while it is written: two runs that
 * share a cache directory do not write into each other.
 *
 * A file is reused when the source still has the hash that the header names. The source is hashed
 * again only when its size, times or inode differ from the header's, or when it was younger than
 * DATA_CACHE_RACY_NS when it was read: then a change within one tick of the clock would not show.
 */
#ifndef IO_WORKER_DATA_CACHE_H
#define IO_WORKER_DATA_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include <sys/stat.h>

#include "io_worker/data_checks.h"

#define DATA_CACHE_RACY_NS 2000000000u

/* Which file it is: a path may name another one tomorrow. */
struct data_identity {
    uint64_t device, inode, size, mtime_ns, ctime_ns;
};

struct data_identity data_identity_of(const struct stat *status);

enum data_cache_kind { DATA_CACHE_TEXT = 1, DATA_CACHE_SCAN = 2, DATA_CACHE_INDEX = 3 };

struct data_cache_header {
    char magic[8];
    uint32_t version;
    uint32_t kind;        /* enum data_cache_kind */
    uint32_t source_kind; /* enum data_source_kind */
    uint32_t token_bytes; /* of the body of a TEXT, of the shard of a SCAN */
    uint64_t tokens;
    uint64_t documents;
    uint64_t skipped;    /* blank lines and empty texts */
    uint64_t token_max;  /* largest id */
    int64_t eos_id;      /* that documents were counted with */
    uint64_t seq_len;    /* INDEX: that pieces were counted with */
    uint64_t pieces;     /* INDEX: samples */
    uint64_t entries;    /* INDEX: documents that make at least one sample */
    uint64_t overlong;   /* INDEX: conversations longer than a sample */
    uint32_t packed;     /* INDEX: whole documents were packed into samples */
    uint32_t dropped;    /* INDEX: overlong ones were left out, not truncated */
    uint64_t scanned_ns; /* CLOCK_REALTIME at which the source was read */
    uint64_t source_hash[2];
    struct data_identity source;
    char tokenizer[32];
    char source_name[304]; /* for people: cut at the front if longer */
    uint64_t checksum;     /* xxh3-64 of all before */
};

#define DATA_CACHE_HEADER_BYTES 512
_Static_assert(sizeof(struct data_cache_header) == DATA_CACHE_HEADER_BYTES, "on-disk layout");

/*
 * Name of the cache file for a source: allocated, freed by the caller. `suffix` says what it is.
 * The absolute path of the source is in the name as a hash, so equal base names do not collide.
 */
char *data_cache_path(const char *directory, const char *source_path, const char *suffix);

/*
 * Reads the header at path: 1 whole and of this kind and length, 0 absent or of no use (another
 * version, damaged, cut): to be made again.
 */
int data_cache_load(const char *path, enum data_cache_kind kind, struct data_cache_header *header);

/* The same, and the file stays open: its descriptor, -1 for "of no use". */
int data_cache_open(const char *path, enum data_cache_kind kind, struct data_cache_header *header);

/* Offset of the checks in a cache file. */
uint64_t data_cache_checks_offset(const struct data_cache_header *header);

/* Whether the file is certainly the one that was read for this header, without reading it again. */
int data_cache_matches(const struct data_cache_header *header, const struct data_identity *now);

/* Stores a header with a new identity in place: the contents were found to be the same. */
void data_cache_renew(const char *path, struct data_cache_header *header);

/* A cache file being written. */
struct data_cache_writer {
    char *path, *temporary;
    int fd;
    uint64_t offset; /* of the next flush in the file */
    uint8_t *buffer;
    size_t used;
    struct data_checks checks; /* of what is appended; of a SCAN: set by whoever scanned */
};

/* -ERROR_BUSY when another process writes the same file. Pairs with _finish() or _abandon(). */
int data_cache_begin(struct data_cache_writer *w, const char *path);
int data_cache_append(struct data_cache_writer *w, const void *bytes, size_t n);
/* Appends the checks, completes the header (magic, checksum), flushes, renames. Closes the writer,
 * also on error. */
int data_cache_finish(struct data_cache_writer *w, struct data_cache_header *header);
/* Removes what was written. Allowed after _finish() and on a zeroed writer (does nothing). */
void data_cache_abandon(struct data_cache_writer *w);

#endif
