/*
 * A run file and overrides of the command line, through the TOML reader and every check of the
 * configuration (launcher/config.h).
 *
 *     run file, and after the first NUL byte overrides, one a line
 *
 * What is accepted lies within the limits of its key, is written as an effective run file, and that
 * reads back to the same values and writes the same bytes.
 */
#include "launcher/config_key.h"
#include "tests/fuzz/fuzz.h"

enum { OVERRIDES_MAX = 4, FILE_BYTES_MAX = 1 << 18 };

static char run_path[256], effective_path[256], again_path[256];

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_path(run_path, sizeof run_path, "run.toml");
    fuzz_path(effective_path, sizeof effective_path, "effective.toml");
    fuzz_path(again_path, sizeof again_path, "again.toml");
    return 0;
}

static int is_word(const struct config_limits *limits, uint64_t value)
{
    for (size_t i = 0; i < limits->word_count; i++)
        if (limits->words[i].value == value)
            return 1;
    return 0;
}

static void number_is_within(const struct config_limits *limits, double x)
{
    REQUIRE(x >= limits->float_min && x <= limits->float_max);
    REQUIRE(x > limits->float_min || limits->at_min == CONFIG_BOUND_INCLUDED);
    REQUIRE(x < limits->float_max || limits->at_max == CONFIG_BOUND_INCLUDED);
}

static void strings_are_whole(const struct config_strings *list, int not_empty, int paths)
{
    REQUIRE(list->count > 0 || !not_empty);
    for (size_t i = 0; i < list->count; i++)
        REQUIRE(list->items[i] != NULL && (!paths || list->items[i][0] == '/'));
}

/* An alternative that is off is 0 or empty whatever its limits. */
static void value_is_within(const struct config_key *key, const void *field)
{
    const struct config_limits *limits = &key->limits;
    if (config_key_alternative((int)(key - config_key_table)) != CONFIG_ORDINAL_NONE &&
        config_value_is_off(key, field))
        return;
    const uint64_t n = key->type == CONFIG_TYPE_INT || key->type == CONFIG_TYPE_SIZE
                           ? *(const uint64_t *)field
                           : 0;
    switch (key->type) {
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_SIZE:
        if (key->change == CONFIG_CHANGE_FOLLOWS) /* a product, set by the program */
            break;
        REQUIRE(is_word(limits, n) || (n >= limits->int_min && n <= limits->int_max));
        REQUIRE(!limits->page_size || (n % limits->int_min == 0 && (n & (n - 1)) == 0));
        break;
    case CONFIG_TYPE_FLOAT:
        number_is_within(limits, *(const double *)field);
        break;
    case CONFIG_TYPE_PAIR:
        number_is_within(limits, ((const double *)field)[0]);
        number_is_within(limits, ((const double *)field)[1]);
        break;
    case CONFIG_TYPE_STRINGS:
    case CONFIG_TYPE_PATHS:
        strings_are_whole(field, limits->not_empty, key->type == CONFIG_TYPE_PATHS);
        break;
    case CONFIG_TYPE_STRING:
    case CONFIG_TYPE_PATH:
        REQUIRE(*(char *const *)field != NULL);
        REQUIRE(!limits->not_empty || (*(char *const *)field)[0] != '\0');
        break;
    case CONFIG_TYPE_BOOL:
    case CONFIG_TYPE_ENUM:
        break;
    }
}

/* Of numbers every bit: their texts are what might lose some. */
static size_t number_bytes(enum config_type type)
{
    switch (type) {
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_SIZE:
        return sizeof(uint64_t);
    case CONFIG_TYPE_FLOAT:
        return sizeof(double);
    case CONFIG_TYPE_PAIR:
        return 2 * sizeof(double);
    default:
        return 0;
    }
}

static void same_values(const struct config *a, const struct config *b)
{
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++) {
        const struct config_key *key = &config_key_table[i];
        char *x = config_value_text(key, config_key_value(key, a));
        char *y = config_value_text(key, config_key_value(key, b));
        REQUIRE(strcmp(x, y) == 0);
        REQUIRE(memcmp(config_key_value(key, a), config_key_value(key, b),
                       number_bytes(key->type)) == 0);
        free(x);
        free(y);
    }
    struct config_hash p = config_bits_hash(a), q = config_bits_hash(b);
    REQUIRE(p.high == q.high && p.low == q.low);
    REQUIRE(config_compare_resume(a, b, NULL, NULL) == 0);
}

static size_t read_file(const char *path, char *bytes, size_t capacity)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, bytes, capacity);
    REQUIRE(n >= 0 && (size_t)n < capacity);
    REQUIRE(close(fd) == 0);
    return (size_t)n;
}

static void accepted(const struct config *config)
{
    static char first[FILE_BYTES_MAX], second[FILE_BYTES_MAX];
    struct config again;
    for (size_t i = 0; i < CONFIG_KEY_COUNT; i++)
        value_is_within(&config_key_table[i], config_key_value(&config_key_table[i], config));
    REQUIRE(config->training_global_batch_size ==
            config->training_micro_batch_size * config->training_gradient_accumulation_steps);
    int missing = config_refuse_missing(config);
    if (missing < 0)
        fuzz_refused(missing, FUZZ_USER);
    REQUIRE(config_write(config, effective_path) == 0);
    REQUIRE(config_load(&again, effective_path, NULL, 0) == 0);
    same_values(config, &again);
    REQUIRE(config_write(&again, again_path) == 0);
    size_t n = read_file(effective_path, first, sizeof first);
    REQUIRE(n == read_file(again_path, second, sizeof second) && memcmp(first, second, n) == 0);
    config_destroy(&again);
}

static size_t split_overrides(char *text, char *overrides[OVERRIDES_MAX])
{
    size_t n = 0;
    for (char *line = text; line && *line && n < OVERRIDES_MAX;) {
        overrides[n++] = line;
        line = strchr(line, '\n');
        if (line)
            *line++ = '\0';
    }
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct config nothing;
    struct config config;
    char *overrides[OVERRIDES_MAX], *text = NULL;
    const uint8_t *nul = size > 0 ? memchr(data, '\0', size) : NULL;
    size_t file_bytes = nul ? (size_t)(nul - data) : size, n = 0;
    if (nul) {
        text = strndup((const char *)nul + 1, size - file_bytes - 1);
        REQUIRE(text != NULL);
        n = split_overrides(text, overrides);
    }
    fuzz_write_file(run_path, data, file_bytes);
    error_clear();
    int rc = config_load(&config, run_path, overrides, n);
    if (rc < 0) {
        fuzz_refused(rc, FUZZ_USER);
        REQUIRE(strstr(error_text(), run_path) || n > 0);
        REQUIRE(memcmp(&config, &nothing, sizeof config) == 0);
    } else {
        accepted(&config);
        config_destroy(&config);
    }
    free(text);
    return 0;
}

/* -- mutation: lines of real keys with interesting values -- */

static const char *const values[] = {
    "0",
    "1",
    "-1",
    "2",
    "0.5",
    "1.0",
    "nan",
    "inf",
    "true",
    "false",
    "\"auto\"",
    "\"\"",
    "[]",
    "\"24GB\"",
    "\"every-3\"",
    "\"cuda:1\"",
    "\"cpu\"",
    "4096",
    "8388608",
    "1e300",
    "1e-320",
    "[0.9, 0.95]",
    "[\"a\", \"b/c\"]",
    "\"\\u0000x\"",
    "\"step\"",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "\"9223372036854775807\"",
    "\"0.1TiB\"",
    "{a = 1}",
    "1979-05-27",
    "'''x\ny'''",
    "0x10",
    "\"none\"",
    "\"full\"",
    "0.30000000000000004",
    "1.7976931348623157e308",
    "5e-324",
    "\xc3\xa9",
    "1 \xe3\x81\x82",
    "\"never\"",
    "\"never\" # c",
    "[\"\\\"\\n\\t\\u00e9\"]",
    "\"bfloat16\"",
    "1_000",
};

static size_t insert(uint8_t *data, size_t size, size_t max_size, size_t at, const char *line)
{
    size_t n = strlen(line);
    if (size + n > max_size)
        return size;
    memmove(data + at + n, data + at, size - at);
    memcpy(data + at, line, n);
    return size + n;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    static const char required[] = "[model]\npath='m'\n[data]\ntrain=['d']\n";
    uint64_t random = seed;
    char line[256];
    const struct config_key *key = &config_key_table[fuzz_below(&random, CONFIG_KEY_COUNT)];
    const char *value = values[fuzz_below(&random, sizeof values / sizeof values[0])];
    static char real[32];
    if (key->type == CONFIG_TYPE_FLOAT && fuzz_below(&random, 3) != 0) {
        double number = (double)fuzz_random(&random) / (double)UINT64_MAX;
        if (fuzz_below(&random, 2) == 0)
            number = number < 0.5 ? key->limits.float_min : key->limits.float_max;
        (void)snprintf(real, sizeof real, "%.17g", number);
        value = real;
    }
    if (key->limits.word_count && fuzz_below(&random, 3) == 0) {
        static char word[64];
        const struct config_limits *limits = &key->limits;
        (void)snprintf(word, sizeof word, "\"%s\"",
                       limits->words[fuzz_below(&random, limits->word_count)].word);
        value = word;
    }
    const uint8_t *nul = size > 0 ? memchr(data, '\0', size) : NULL;
    size_t end = nul ? (size_t)(nul - data) : size;
    switch (fuzz_below(&random, 7)) {
    case 0:
        return insert(data, size, max_size, 0, required);
    case 1:
    case 2: /* dotted, so that it may stand at the top whatever follows */
        (void)snprintf(line, sizeof line, "%s.%s = %s\n", key->section, key->name, value);
        return insert(data, size, max_size, 0, line);
    case 3:
        (void)snprintf(line, sizeof line, "--%s.%s=%s\n", key->section, key->name, value);
        if (!nul && size < max_size) {
            data[size++] = '\0';
            end = size - 1;
        }
        return end < size ? insert(data, size, max_size, end + 1, line) : size;
    case 4: /* a file that is whole but for this value */
        (void)snprintf(line, sizeof line, "%s.%s = %s\n", key->section, key->name, value);
        return insert(data, insert(data, 0, max_size, 0, required), max_size, 0, line);
    default:
        return LLVMFuzzerMutate(data, size, max_size);
    }
}
