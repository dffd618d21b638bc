/*
 * Superblocks: a small store is opened whose superblocks were damaged, swapped or forged, or whose
 * files are cut or missing (io_worker/store.h). Nothing is recovered here; see fuzz_store.c.
 *
 *     | which store | changes ... |
 */
#include "tests/fuzz/store_image.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    images_make();
    return 0;
}

/* The valid copies of a directory's superblock, by the rule once more. */
static unsigned valid_copies(struct image *image, unsigned directory, struct superblock *newest)
{
    const struct image_file *file = &image->files[image_superblock_file(directory)];
    unsigned n = 0;
    for (unsigned copy = 0; copy < SUPERBLOCK_COPIES; copy++) {
        struct superblock super;
        if (file->bytes < (int64_t)(copy + 1) * SECTOR_BYTES)
            continue;
        memcpy(&super, file->now + copy * SECTOR_BYTES, sizeof super);
        uint64_t hash = super.hash;
        super.hash = 0;
        if (super.magic != STORE_SUPERBLOCK_MAGIC || hash != XXH3_64bits(&super, sizeof super))
            continue;
        if (n == 0 || super.generation > newest->generation)
            *newest = super;
        n++;
    }
    return n;
}

/* What may be believed of an opened store. */
static void opened(struct image *image, struct store *store)
{
    enum store_state state = store_state_now(store);
    unsigned present = 0;
    REQUIRE((unsigned)state <= STORE_READY && strlen(store_state_name(state)) > 0);
    for (unsigned d = 0; d < image->n_directories; d++) {
        struct superblock super;
        if (image->files[image_superblock_file(d)].bytes == MISSING)
            continue;
        present++;
        REQUIRE(valid_copies(image, d, &super) > 0);
        REQUIRE(memcmp(super.run, image->f.options.run, RUN_UUID_BYTES) == 0);
        REQUIRE(super.layout_version == STORE_LAYOUT_VERSION);
        if (state == STORE_READY)
            REQUIRE(super.directory == d && super.n_directories == image->n_directories &&
                    super.dtype == image->f.options.dtype && super.slots_per_page == 3);
    }
    REQUIRE((state == STORE_ABSENT) == (present == 0));
    /* a complete store is taken for an incomplete one, and wiped, only if that was forged */
    REQUIRE(image->forged || present == 0 || state == STORE_READY);
    REQUIRE((store_engine(store) != NULL) == (state == STORE_READY));
    REQUIRE(state != STORE_READY || present == image->n_directories);
    for (unsigned i = 1; i < image->n_files && state == STORE_READY;
         i += i + 2 < image->n_files ? 2 : 1)
        REQUIRE(image->files[i].bytes == image->files[i].base_bytes);
}

/* A model's name is as long as its field: what lies behind it is nobody's text. */
static void refused(int rc, const struct image *image)
{
    fuzz_refused(rc, FUZZ_FAILED | FUZZ_USER);
    REQUIRE(strstr(error_text(), image->f.root) != NULL);
    const char *model = strstr(error_text(), "store of another model: ");
    const char *found = model ? strstr(model, ", found ") : NULL;
    const char *hint = found ? strstr(found, "\n  hint: name another offload_dir") : NULL;
    REQUIRE(model == NULL || (found && hint && hint - found < 8 + STORE_MODEL_BYTES));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct image *image = &images[fuzz_u8(&in) % STORES];
    struct store *store = NULL;
    image_damage(image, &in);
    error_clear();
    int rc = store_open(&store, &image->f.options);
    if (rc < 0)
        refused(rc, image);
    else
        opened(image, store);
    if (rc == 0)
        store_close(store);
    image_is_untouched(image);
    image_restore(image);
    return 0;
}

#define FIELD(field) offsetof(struct superblock, field)

struct buffer {
    uint8_t *data;
    size_t size, max_size;
};

/* The same in both copies, and their hashes. */
static void change_both(struct buffer *b, enum damage what, uint64_t directory, uint64_t field,
                        uint64_t value)
{
    for (unsigned copy = 0; copy < SUPERBLOCK_COPIES; copy++) {
        struct fuzz_op op = image_op(what, directory, field + copy * SECTOR_BYTES);
        memcpy(op.value, &value, sizeof value);
        op.extent |= field == FIELD(state) || field == FIELD(directory) ? 3 : 7;
        b->size = image_append(b->data, b->size, b->max_size, op);
        op = image_op(SEAL_SUPERBLOCK, directory, copy);
        b->size = image_append(b->data, b->size, b->max_size, op);
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const uint16_t fields[] = {
        FIELD(magic),         FIELD(layout_version), FIELD(state),          FIELD(generation),
        FIELD(run),           FIELD(store),          FIELD(directory),      FIELD(n_directories),
        FIELD(page_elements), FIELD(n_pages),        FIELD(dtype),          FIELD(slots_per_page),
        FIELD(model_digest),  FIELD(model),          FIELD(stripe_weights), FIELD(slots_bytes),
        FIELD(commit_bytes),  FIELD(unused),         FIELD(hash),
    };
    uint64_t random = seed;
    struct buffer b = {data, size, max_size};
    const uint64_t directory = fuzz_below(&random, 2), value = fuzz_number(&random);
    if (size < 1)
        return LLVMFuzzerMutate(data, size, max_size);
    if (fuzz_below(&random, 8) == 0)
        data[0] ^= 1; /* the other store */
    switch (fuzz_below(&random, 10)) {
    case 0:
        return image_append(data, size, max_size, image_op(SWAP_SUPERBLOCKS, 0, 0));
    case 1:
        return image_append(data, size, max_size, image_op(DELETE_FILE, value, 0));
    case 2:
        return image_append(data, size, max_size, image_op(CUT_FILE, value, 0));
    case 3:
    case 4:
        change_both(&b, DAMAGE_SUPERBLOCK, directory, FIELD(state), fuzz_below(&random, 5));
        return b.size;
    case 5: /* of another model, whose name may have no end */
        change_both(&b, FILL_SUPERBLOCK, directory, FIELD(model), 'x');
        change_both(&b, DAMAGE_SUPERBLOCK, directory, FIELD(stripe_weights), value);
        change_both(&b, DAMAGE_SUPERBLOCK, directory, FIELD(model_digest), value);
        return b.size;
    case 6:
    case 7:
        change_both(&b, DAMAGE_SUPERBLOCK, directory,
                    fields[fuzz_below(&random, sizeof fields / sizeof fields[0])], value);
        return b.size;
    default:
        return LLVMFuzzerMutate(data, size, max_size);
    }
}
