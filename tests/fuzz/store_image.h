/*
 * A small store with three commits, its files also held in memory; an input is a list of damages
 * (and of checksums made right again) that are applied to both, and undone afterwards.
 *
 * Two stores stand ready: float32 in one directory, bfloat16 in two. `genuine` are the commits that
 * were really made; an input without SEAL or ADOPT forges nothing, so what recovery then believes
 * must be one of them, byte for byte.
 */
#ifndef TESTS_FUZZ_STORE_IMAGE_H
#define TESTS_FUZZ_STORE_IMAGE_H

#include "tests/fuzz/fuzz.h"
#include "tests/io/store_fixture.h"

#include <xxhash.h>

enum {
    STORES = 2,
    COMMITS = 4, /* sequence 0 .. 3 */
    PAGES_MAX = 8,
    FILES_MAX = 5, /* per directory superblock and slots, and the commit file */
    PAGE_ELEMENTS = 8192,
    COMMIT_TABLE_PLACES = 2,
    MISSING = -1,
    TOUCHED_MAX = 2 * FUZZ_OPS_MAX + 2,
};

struct image_file {
    char path[96];
    int64_t bytes; /* MISSING: deleted */
    int64_t base_bytes;
    uint8_t *base, *now; /* base_bytes each */
};

struct image {
    struct fixture f;
    struct image_file files[FILES_MAX];
    unsigned n_files, n_directories;
    struct page_entry tables[COMMITS][PAGES_MAX];
    struct commit_record records[COMMITS];
    struct {
        unsigned file;
        uint64_t offset, bytes;
    } touched[TOUCHED_MAX];
    unsigned n_touched;
    int forged;
};

static struct image images[STORES];

enum damage {
    DAMAGE_SUPERBLOCK,
    DAMAGE_RECORD,
    DAMAGE_TABLE,
    DAMAGE_SLOT,
    DAMAGE_BYTE, /* anywhere, in units of 64 bytes */
    SEAL_SUPERBLOCK,
    SEAL_RECORD,
    SEAL_TABLE, /* the table that a record names: digest and state hash, then the record */
    SEAL_ENTRY,
    SEAL_SLOT,
    ADOPT_SLOT, /* a table's entry becomes the one of what the slot holds */
    COPY_SLOT,  /* a stale or misdirected write */
    COPY_RECORD,
    CUT_FILE,
    DELETE_FILE,
    FILL_SUPERBLOCK,  /* 64 bytes with one value */
    SWAP_SUPERBLOCKS, /* as when directories are named in another order */
    DAMAGE_COUNT,
    DAMAGE_KINDS_MAX = 32, /* a new kind changes the meaning of no input */
};

/* -- making them -- */

static inline unsigned image_superblock_file(unsigned directory)
{
    return 2 * directory;
}

static inline unsigned image_slots_file(unsigned directory)
{
    return 2 * directory + 1;
}

static inline unsigned image_commit_file(const struct image *image)
{
    return 2 * image->n_directories;
}

static inline void image_load(struct image_file *file)
{
    struct stat st;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    REQUIRE(fd >= 0 && fstat(fd, &st) == 0);
    file->bytes = file->base_bytes = st.st_size;
    file->base = malloc((size_t)st.st_size);
    file->now = malloc((size_t)st.st_size);
    REQUIRE(file->base && file->now && read(fd, file->base, (size_t)st.st_size) == st.st_size);
    memcpy(file->now, file->base, (size_t)st.st_size);
    REQUIRE(close(fd) == 0);
}

static inline void image_make(struct image *image, enum dtype_mode dtype, unsigned n_directories)
{
    struct model_config config = fixture_config();
    struct fixture *f = &image->f;
    config.vocab_size = 64;
    config.hidden_size = 16;
    config.intermediate_size = 16;
    config.n_layers = 1;
    config.n_heads = 2;
    config.n_kv_heads = 1;
    fixture_init_model(f, &config, dtype, PAGE_ELEMENTS, n_directories, fuzz_directory());
    REQUIRE(f->layout.n_pages <= PAGES_MAX);
    f->options.engine = ENGINE_SYNC;
    image->n_directories = n_directories;
    image->n_files = 2 * n_directories + 1;
    fixture_create(f);
    for (unsigned i = 0; i < COMMITS; i++) {
        if (i > 0)
            fixture_steps(f, 1);
        image->records[i] = f->record;
        memcpy(image->tables[i], f->committed, f->layout.n_pages * sizeof *f->committed);
    }
    fixture_close_store(f);
    for (unsigned i = 0; i < image->n_files; i++) {
        const char *name = i + 1 == image->n_files ? "commit" : i % 2 ? "slots" : "superblock";
        const char *where = f->paths[i + 1 == image->n_files ? 0 : i / 2];
        (void)snprintf(image->files[i].path, sizeof image->files[i].path, "%.80s/%s", where, name);
        image_load(&image->files[i]);
    }
}

static inline void images_make(void)
{
    image_make(&images[0], DTYPE_FLOAT32, 1);
    image_make(&images[1], DTYPE_BFLOAT16, 2);
}

/* -- what is where -- */

struct stretch {
    unsigned file;
    uint64_t offset, bytes;
};

static inline uint64_t image_pages(const struct image *image)
{
    return image->f.layout.n_pages;
}

static inline struct stretch image_record(const struct image *image, unsigned i)
{
    return (struct stretch){image_commit_file(image),
                            commit_record_offset(image_pages(image), i % COMMIT_RECORD_RING),
                            COMMIT_RECORD_BYTES};
}

static inline struct stretch image_table(const struct image *image, unsigned place)
{
    uint64_t bytes = commit_table_bytes(image_pages(image));
    return (struct stretch){image_commit_file(image), place % COMMIT_TABLE_PLACES * bytes, bytes};
}

static inline struct stretch image_entry(const struct image *image, unsigned place, uint64_t page)
{
    struct stretch s = image_table(image, place);
    s.offset += 4096 + page % image_pages(image) * sizeof(struct page_entry);
    s.bytes = sizeof(struct page_entry);
    return s;
}

static inline struct stretch image_superblocks(const struct image *image, unsigned directory)
{
    return (struct stretch){image_superblock_file(directory % image->n_directories), 0,
                            SUPERBLOCK_COPIES * SECTOR_BYTES};
}

/* The stripe map, by the rule of store.c with equal weights: to the emptier directory. */
static inline struct stretch image_slot(const struct image *image, unsigned which)
{
    uint64_t used[FIXTURE_DIRECTORIES_MAX] = {0}, page = which / 3 % image_pages(image);
    struct page_image_layout layout;
    unsigned at = 0;
    for (uint64_t p = 0; p <= page; p++) {
        at = image->n_directories > 1 && used[1] < used[0];
        page_image_layout(&layout, image->f.options.dtype, image->f.layout.pages[p].elements);
        used[at] += 3 * layout.bytes;
    }
    return (struct stretch){image_slots_file(at), used[at] - (3 - which % 3) * layout.bytes,
                            layout.bytes};
}

static inline uint8_t *image_at(struct image *image, struct stretch s)
{
    REQUIRE(s.offset + s.bytes <= (uint64_t)image->files[s.file].base_bytes);
    return image->files[s.file].now + s.offset;
}

/* -- damaging -- */

static inline void image_touch(struct image *image, struct stretch s)
{
    REQUIRE(image->n_touched < TOUCHED_MAX);
    image->touched[image->n_touched].file = s.file;
    image->touched[image->n_touched].offset = s.offset;
    image->touched[image->n_touched++].bytes = s.bytes;
}

static inline void image_write(struct image *image, struct stretch s, const struct fuzz_op *op)
{
    uint64_t at = op->at % s.bytes;
    fuzz_op_write(op, image_at(image, s), s.bytes, at);
    s.offset += at;
    s.bytes = fuzz_op_bytes(op) < s.bytes - at ? fuzz_op_bytes(op) : s.bytes - at;
    image_touch(image, s);
}

static inline void seal_superblock(struct image *image, unsigned directory, unsigned copy)
{
    struct stretch s = image_superblocks(image, directory);
    s.offset += copy % SUPERBLOCK_COPIES * SECTOR_BYTES;
    s.bytes = SECTOR_BYTES;
    struct superblock super;
    memcpy(&super, image_at(image, s), sizeof super);
    super.hash = 0;
    super.hash = XXH3_64bits(&super, sizeof super);
    memcpy(image_at(image, s), &super, sizeof super);
    image_touch(image, s);
}

static inline void seal_record(struct image *image, unsigned i)
{
    struct stretch s = image_record(image, i);
    struct commit_record record;
    memcpy(&record, image_at(image, s), sizeof record);
    record.record_hash = 0;
    record.record_hash = XXH3_64bits(&record, sizeof record);
    memcpy(image_at(image, s), &record, sizeof record);
    image_touch(image, s);
}

static inline void seal_table(struct image *image, unsigned i)
{
    struct stretch s = image_record(image, i);
    struct commit_record record;
    struct page_entry entries[PAGES_MAX];
    memcpy(&record, image_at(image, s), sizeof record);
    struct stretch table = image_table(image, record.table_place);
    record.table_digest = page_image_digest(image_at(image, table), table.bytes);
    memcpy(entries, image_at(image, table) + 4096, image_pages(image) * sizeof entries[0]);
    if (record.facts.spike_count <= SPIKE_WINDOW_STEPS)
        record.state_hash = commit_state_hash(&record.facts, entries, image_pages(image));
    memcpy(image_at(image, s), &record, sizeof record);
    seal_record(image, i);
}

static inline void seal_entry(struct image *image, unsigned place, uint64_t page)
{
    struct stretch s = image_entry(image, place, page);
    struct page_entry entry;
    memcpy(&entry, image_at(image, s), sizeof entry);
    page_entry_seal(&entry);
    memcpy(image_at(image, s), &entry, sizeof entry);
    image_touch(image, s);
}

static inline void seal_slot(struct image *image, unsigned which, int digests)
{
    struct stretch s = image_slot(image, which);
    uint8_t *bytes = image_at(image, s);
    struct page_image_header header;
    memcpy(&header, bytes, sizeof header);
    for (unsigned part = 0; part < PART_COUNT && digests; part++)
        if (header.offset[part] <= s.bytes && header.length[part] <= s.bytes - header.offset[part])
            header.digest[part] =
                page_image_digest(bytes + header.offset[part], header.length[part]);
    header.header_hash = 0;
    memcpy(bytes, &header, sizeof header);
    header.header_hash = XXH3_64bits(bytes, PAGE_IMAGE_HEADER_BYTES);
    memcpy(bytes, &header, sizeof header);
    s.bytes = PAGE_IMAGE_HEADER_BYTES;
    image_touch(image, s);
}

static inline void adopt_slot(struct image *image, unsigned which, unsigned place)
{
    struct stretch to = image_entry(image, place, which / 3 % image_pages(image));
    struct page_entry entry;
    page_entry_from_image(&entry, image_at(image, image_slot(image, which)), which % 3);
    memcpy(image_at(image, to), &entry, sizeof entry);
    image_touch(image, to);
}

static inline void copy_stretch(struct image *image, struct stretch from, struct stretch to)
{
    to.bytes = from.bytes < to.bytes ? from.bytes : to.bytes;
    memmove(image_at(image, to), image_at(image, from), to.bytes);
    image_touch(image, to);
}

static inline void fill_superblock(struct image *image, unsigned directory,
                                   const struct fuzz_op *op)
{
    struct stretch s = image_superblocks(image, directory);
    uint64_t at = op->at % s.bytes;
    s.bytes = s.bytes - at < STORE_MODEL_BYTES ? s.bytes - at : STORE_MODEL_BYTES;
    s.offset += at;
    memset(image_at(image, s), op->value[0], s.bytes);
    image_touch(image, s);
}

static inline void swap_superblocks(struct image *image)
{
    struct stretch a = image_superblocks(image, 0);
    struct stretch b = image_superblocks(image, image->n_directories - 1);
    uint8_t kept[SUPERBLOCK_COPIES * SECTOR_BYTES];
    memcpy(kept, image_at(image, a), sizeof kept);
    memmove(image_at(image, a), image_at(image, b), sizeof kept);
    memcpy(image_at(image, b), kept, sizeof kept);
    image_touch(image, a);
    image_touch(image, b);
}

static inline void damage(struct image *image, const struct fuzz_op *op)
{
    const unsigned what = op->what % DAMAGE_KINDS_MAX, which = fuzz_op_which(op);
    struct image_file *file = &image->files[which % image->n_files];
    struct stretch anywhere = {which % image->n_files, op->at * 64ull % (uint64_t)file->base_bytes,
                               1};
    switch ((enum damage)what) {
    case DAMAGE_SUPERBLOCK:
        image_write(image, image_superblocks(image, which), op);
        break;
    case DAMAGE_RECORD:
        image_write(image, image_record(image, which), op);
        break;
    case DAMAGE_TABLE:
        image_write(image, image_table(image, which), op);
        break;
    case DAMAGE_SLOT:
        image_write(image, image_slot(image, which), op);
        break;
    case DAMAGE_BYTE:
        *image_at(image, anywhere) ^= op->value[0];
        image_touch(image, anywhere);
        break;
    case SEAL_SUPERBLOCK:
        seal_superblock(image, which, op->at);
        break;
    case SEAL_RECORD:
        seal_record(image, op->at);
        break;
    case SEAL_TABLE:
        seal_table(image, op->at);
        break;
    case SEAL_ENTRY:
        seal_entry(image, which, op->at);
        break;
    case SEAL_SLOT:
        seal_slot(image, op->at, op->value[0] & 1);
        break;
    case ADOPT_SLOT:
        adopt_slot(image, op->at, which);
        break;
    case COPY_SLOT:
        copy_stretch(image, image_slot(image, op->at), image_slot(image, op->value[0]));
        break;
    case COPY_RECORD:
        copy_stretch(image, image_record(image, op->at), image_record(image, op->value[0]));
        break;
    case CUT_FILE:
        if (file->bytes != MISSING)
            file->bytes = (int64_t)(fuzz_op_value(op) % (2 * (uint64_t)file->base_bytes));
        break;
    case DELETE_FILE:
        file->bytes = MISSING;
        break;
    case FILL_SUPERBLOCK:
        fill_superblock(image, which, op);
        break;
    case SWAP_SUPERBLOCKS:
        swap_superblocks(image);
        break;
    default:
        break;
    }
    image->forged |= what >= SEAL_SUPERBLOCK && what <= ADOPT_SLOT;
}

/* -- to the disk and back -- */

static inline void file_put(const struct image_file *file, const uint8_t *from, uint64_t offset,
                            uint64_t bytes)
{
    if (file->bytes <= (int64_t)offset)
        return;
    if (bytes > (uint64_t)file->bytes - offset)
        bytes = (uint64_t)file->bytes - offset;
    int fd = open(file->path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    REQUIRE(fd >= 0);
    REQUIRE(pwrite(fd, from + offset, bytes, (off_t)offset) == (ssize_t)bytes);
    REQUIRE(close(fd) == 0);
}

/* Applies the damages of the input to memory and files. */
static inline void image_damage(struct image *image, struct fuzz_input *in)
{
    struct fuzz_op op;
    image->n_touched = 0;
    image->forged = 0;
    for (int i = 0; i < FUZZ_OPS_MAX && fuzz_next_op(in, &op); i++)
        damage(image, &op);
    for (unsigned i = 0; i < image->n_files; i++) {
        struct image_file *file = &image->files[i];
        if (file->bytes == MISSING)
            REQUIRE(unlink(file->path) == 0);
        else if (file->bytes != file->base_bytes)
            REQUIRE(truncate(file->path, file->bytes) == 0);
    }
    for (unsigned i = 0; i < image->n_touched; i++) {
        struct image_file *file = &image->files[image->touched[i].file];
        file_put(file, file->now, image->touched[i].offset, image->touched[i].bytes);
    }
}

/* Nothing is repaired or changed in place: the files are what the damage made them. */
static inline void image_is_untouched(struct image *image)
{
    static uint8_t found[4 << 20];
    for (unsigned i = 0; i < image->n_files; i++) {
        const struct image_file *file = &image->files[i];
        struct stat st;
        int fd = open(file->path, O_RDONLY | O_CLOEXEC);
        REQUIRE((fd < 0) == (file->bytes == MISSING));
        if (fd < 0)
            continue;
        REQUIRE(fstat(fd, &st) == 0 && st.st_size == file->bytes);
        int64_t bytes = file->bytes < file->base_bytes ? file->bytes : file->base_bytes;
        REQUIRE((size_t)bytes <= sizeof found && pread(fd, found, (size_t)bytes, 0) == bytes);
        REQUIRE(memcmp(found, file->now, (size_t)bytes) == 0);
        REQUIRE(close(fd) == 0);
    }
}

static inline void image_restore(struct image *image)
{
    for (unsigned i = 0; i < image->n_files; i++) {
        struct image_file *file = &image->files[i];
        int whole = file->bytes == file->base_bytes;
        file->bytes = file->base_bytes;
        if (whole)
            continue;
        file_put(file, file->base, 0, (uint64_t)file->base_bytes);
        REQUIRE(truncate(file->path, file->base_bytes) == 0);
    }
    for (unsigned i = 0; i < image->n_touched; i++) {
        struct image_file *file = &image->files[image->touched[i].file];
        memcpy(file->now + image->touched[i].offset, file->base + image->touched[i].offset,
               image->touched[i].bytes);
    }
    for (unsigned i = 0; i < image->n_touched; i++) {
        const struct image_file *file = &image->files[image->touched[i].file];
        file_put(file, file->base, image->touched[i].offset, image->touched[i].bytes);
    }
}

/* -- mutation: a damage and, mostly, the checksums that it broke -- */

static inline struct fuzz_op image_op(enum damage what, uint64_t which, uint64_t at)
{
    return (struct fuzz_op){
        .what = (uint8_t)what, .extent = (uint8_t)(which % 32 << 3), .at = (uint16_t)at};
}

static inline size_t image_append(uint8_t *data, size_t size, size_t max_size, struct fuzz_op op)
{
    if (size + sizeof op > max_size)
        return size;
    memcpy(data + size, &op, sizeof op);
    return size + sizeof op;
}

#endif
