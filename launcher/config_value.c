/* One value: from TOML into its field, and back. Everything that depends on a key's type is here.
 */
#include "launcher/config_key.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/size.h"
#include "procs/check.h"
#include "procs/error.h"

/* Configuration strings are few and short; without memory for them nothing can start. */
static char *copy_string(const char *text)
{
    char *copy = strdup(text);
    CHECK(copy != NULL);
    return copy;
}

static bool is_number(const struct toml_value *value)
{
    return value->kind == TOML_INTEGER || value->kind == TOML_FLOAT;
}

/* --- printing ------------------------------------------------------------------------------- */

static void print_string(const char *text, FILE *out)
{
    fputc('"', out);
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(out, "\\%c", *c);
        else if ((unsigned char)*c < 0x20 || *c == 0x7f)
            fprintf(out, "\\u%04X", (unsigned)*c);
        else
            fputc(*c, out);
    }
    fputc('"', out);
}

/* The shortest text that reads back to the same double, with the point or exponent TOML asks for.
 */
static void print_double(double number, FILE *out)
{
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        (void)snprintf(text, sizeof text, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            break;
    }
    fputs(text, out);
    if (!strpbrk(text, ".en"))
        fputs(".0", out);
}

static void print_list(const struct config_strings *list, FILE *out)
{
    fputc('[', out);
    for (size_t i = 0; i < list->count; i++) {
        fputs(i ? ", " : "", out);
        print_string(list->items[i], out);
    }
    fputc(']', out);
}

static void print_count(const struct config_key *key, uint64_t count, FILE *out)
{
    for (size_t i = 0; i < key->limits.word_count; i++) {
        if (key->limits.words[i].value == count) {
            print_string(key->limits.words[i].word, out);
            return;
        }
    }
    if (key->limits.prefix)
        fprintf(out, "\"%s%llu\"", key->limits.prefix, (unsigned long long)count);
    else
        fprintf(out, "%llu", (unsigned long long)count);
}

static void print_enum(const struct config_key *key, const void *field, FILE *out)
{
    unsigned choice;
    memcpy(&choice, field, sizeof choice);
    for (size_t i = 0; i < key->limits.word_count; i++) {
        if (key->limits.words[i].value == choice)
            print_string(key->limits.words[i].word, out);
    }
}

void config_value_print(const struct config_key *key, const void *field, FILE *out)
{
    switch (key->type) {
    case CONFIG_TYPE_BOOL:
        fputs(*(const bool *)field ? "true" : "false", out);
        break;
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_SIZE:
        print_count(key, *(const uint64_t *)field, out);
        break;
    case CONFIG_TYPE_FLOAT:
        print_double(*(const double *)field, out);
        break;
    case CONFIG_TYPE_PAIR:
        fputc('[', out);
        print_double(((const double *)field)[0], out);
        fputs(", ", out);
        print_double(((const double *)field)[1], out);
        fputc(']', out);
        break;
    case CONFIG_TYPE_ENUM:
        print_enum(key, field, out);
        break;
    case CONFIG_TYPE_STRING:
    case CONFIG_TYPE_PATH:
        print_string(*(char *const *)field ? *(char *const *)field : "", out);
        break;
    case CONFIG_TYPE_STRINGS:
    case CONFIG_TYPE_PATHS:
        print_list(field, out);
        break;
    }
}

char *config_value_text(const struct config_key *key, const void *field)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    CHECK(out != NULL);
    config_value_print(key, field, out);
    CHECK(fclose(out) == 0);
    return text;
}

/* --- messages ------------------------------------------------------------------------------- */

static void print_words(const struct config_limits *limits, const char *last_joint, FILE *out)
{
    for (size_t i = 0; i < limits->word_count; i++) {
        if (i)
            fputs(i + 1 == limits->word_count ? last_joint : ", ", out);
        print_string(limits->words[i].word, out);
    }
}

static void print_expected_count(const struct config_key *key, FILE *out)
{
    const struct config_limits *limits = &key->limits;
    const char *unit = key->type == CONFIG_TYPE_SIZE ? "a size in bytes" : "an integer";
    print_words(limits, ", ", out);
    if (limits->word_count)
        fputs(" or ", out);
    if (limits->prefix)
        fprintf(out, "\"%sN\" with N ", limits->prefix);
    else
        fprintf(out, "%s ", unit);
    if (limits->int_max == INT64_MAX)
        fprintf(out, "of at least %llu", (unsigned long long)limits->int_min);
    else
        fprintf(out, "from %llu to %llu", (unsigned long long)limits->int_min,
                (unsigned long long)limits->int_max);
    if (limits->page_size)
        fprintf(out, ", %llu x 2^k", (unsigned long long)limits->int_min);
    if (key->type == CONFIG_TYPE_SIZE)
        fputs(" (24000000000, \"24GB\" or \"24GiB\")", out);
}

static void print_expected_number(const struct config_limits *limits, FILE *out)
{
    bool open_min = limits->at_min == CONFIG_BOUND_EXCLUDED;
    bool open_max = limits->at_max == CONFIG_BOUND_EXCLUDED;
    fprintf(out, open_min ? "above %g" : "of at least %g", limits->float_min);
    fprintf(out, open_max ? " and below %g" : " and at most %g", limits->float_max);
}

void config_value_print_expected(const struct config_key *key, FILE *out)
{
    const char *filled = key->limits.not_empty ? "non-empty " : "";
    switch (key->type) {
    case CONFIG_TYPE_BOOL:
        fputs("true or false", out);
        break;
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_SIZE:
        print_expected_count(key, out);
        break;
    case CONFIG_TYPE_FLOAT:
        fputs("a number ", out);
        print_expected_number(&key->limits, out);
        break;
    case CONFIG_TYPE_PAIR:
        fputs("an array of two numbers, each ", out);
        print_expected_number(&key->limits, out);
        break;
    case CONFIG_TYPE_ENUM:
        print_words(&key->limits, " or ", out);
        break;
    case CONFIG_TYPE_STRING:
        fprintf(out, "a %sstring", filled);
        break;
    case CONFIG_TYPE_PATH:
        fprintf(out, "a %sstring (a path)", filled);
        break;
    case CONFIG_TYPE_STRINGS:
    case CONFIG_TYPE_PATHS:
        fprintf(out, "%s %sarray of %s", *filled ? "a" : "an", filled, filled);
        fputs(key->type == CONFIG_TYPE_PATHS ? "paths" : "strings", out);
        break;
    }
}

static void print_found(const struct toml_value *value, FILE *out)
{
    enum { SHOWN_BYTES_MAX = 80 };
    switch (value->kind) {
    case TOML_STRING:
        if (value->string_bytes <= SHOWN_BYTES_MAX)
            print_string(value->string, out);
        else
            fprintf(out, "a string of %zu bytes", value->string_bytes);
        break;
    case TOML_INTEGER:
        fprintf(out, "%lld", (long long)value->integer);
        break;
    case TOML_FLOAT:
        print_double(value->number, out);
        break;
    case TOML_BOOLEAN:
        fputs(value->boolean ? "true" : "false", out);
        break;
    case TOML_ARRAY:
        fprintf(out, "an array of %zu", value->item_count);
        break;
    case TOML_OTHER:
        fputs(value->string, out);
        break;
    }
}

/* "expected ..., found ..."; `what` names the value that is wrong, the whole or an item of it. */
static int refuse(const struct config_key *key, const struct toml_value *what)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    CHECK(out != NULL);
    fputs("expected ", out);
    config_value_print_expected(key, out);
    fputs(", found ", out);
    print_found(what, out);
    CHECK(fclose(out) == 0);
    int rc = error_set(ERROR_USER, "%s", text);
    free(text);
    return rc;
}

/* --- from TOML ------------------------------------------------------------------------------ */

static const struct config_word *find_word(const struct config_limits *limits,
                                           const struct toml_value *value)
{
    for (size_t i = 0; value->kind == TOML_STRING && i < limits->word_count; i++) {
        if (strcmp(value->string, limits->words[i].word) == 0)
            return &limits->words[i];
    }
    return NULL;
}

/* "every-4" */
static bool parse_prefixed(const struct config_limits *limits, const char *text, uint64_t *count)
{
    size_t prefix_bytes = strlen(limits->prefix);
    const char *digits = text + prefix_bytes;
    if (strncmp(text, limits->prefix, prefix_bytes) != 0 || !*digits || strlen(digits) > 18 ||
        strspn(digits, "0123456789") != strlen(digits))
        return false;
    *count = strtoull(digits, NULL, 10);
    return true;
}

static bool parse_count(const struct config_key *key, const struct toml_value *value,
                        uint64_t *count)
{
    const struct config_limits *limits = &key->limits;
    if (limits->prefix)
        return value->kind == TOML_STRING && parse_prefixed(limits, value->string, count);
    if (value->kind == TOML_INTEGER && value->integer >= 0) {
        *count = (uint64_t)value->integer;
        return true;
    }
    return key->type == CONFIG_TYPE_SIZE && value->kind == TOML_STRING &&
           size_parse(value->string, count) == 0;
}

static bool is_page_size(uint64_t count, uint64_t unit)
{
    return count % unit == 0 && ((count / unit) & (count / unit - 1)) == 0;
}

static int set_count(const struct config_key *key, const struct toml_value *value, uint64_t *field)
{
    const struct config_limits *limits = &key->limits;
    const struct config_word *word = find_word(limits, value);
    uint64_t count = 0;
    if (word) {
        *field = word->value;
        return 0;
    }
    if (!parse_count(key, value, &count) || count < limits->int_min || count > limits->int_max ||
        (limits->page_size && !is_page_size(count, limits->int_min)))
        return refuse(key, value);
    *field = count;
    return 0;
}

static bool is_within(const struct config_limits *limits, double number)
{
    bool above = limits->at_min == CONFIG_BOUND_EXCLUDED ? number > limits->float_min
                                                         : number >= limits->float_min;
    bool below = limits->at_max == CONFIG_BOUND_EXCLUDED ? number < limits->float_max
                                                         : number <= limits->float_max;
    return isfinite(number) && above && below;
}

static int set_float(const struct config_key *key, const struct toml_value *value, double *field)
{
    if (!is_number(value) || !is_within(&key->limits, value->number))
        return refuse(key, value);
    *field = value->number + 0.0; /* -0.0 becomes 0.0: equal values have equal texts */
    return 0;
}

static int set_pair(const struct config_key *key, const struct toml_value *value, double *field)
{
    if (value->kind != TOML_ARRAY || value->item_count != 2)
        return refuse(key, value);
    double pair[2];
    for (size_t i = 0; i < 2; i++) {
        int rc = set_float(key, &value->items[i], &pair[i]);
        if (rc < 0)
            return rc;
    }
    memcpy(field, pair, sizeof pair);
    return 0;
}

static int set_enum(const struct config_key *key, const struct toml_value *value, void *field)
{
    const struct config_word *word = find_word(&key->limits, value);
    if (!word)
        return refuse(key, value);
    unsigned choice = (unsigned)word->value; /* gcc's type for an enum without negative values */
    memcpy(field, &choice, sizeof choice);
    return 0;
}
_Static_assert(sizeof(enum config_log_progress) == sizeof(unsigned), "set_enum stores an unsigned");

/* Is this well-formed UTF-8? Command lines and directories need not be, TOML is. */
static bool is_utf8(const char *text)
{
    const unsigned char *c = (const unsigned char *)text;
    while (*c) {
        unsigned length = *c < 0x80 ? 1 : *c < 0xc2 ? 0 : *c < 0xe0 ? 2 : *c < 0xf0 ? 3 : 4;
        if (length == 0 || *c > 0xf4 || (*c == 0xe0 && c[1] < 0xa0) ||
            (*c == 0xed && c[1] >= 0xa0) || (*c == 0xf0 && c[1] < 0x90) ||
            (*c == 0xf4 && c[1] >= 0x90))
            return false;
        for (unsigned i = 1; i < length; i++) {
            if ((c[i] & 0xc0) != 0x80)
                return false;
        }
        c += length;
    }
    return true;
}

/* Drops "//", "/./" and a last "/", so that one place has one text; ".." is left to the system. */
static void tidy_path(char *path)
{
    char *to = path;
    for (const char *from = path; *from;) {
        if (*from == '/' && (from[1] == '/' || from[1] == '\0') && !(from == path && !from[1]))
            from++;
        else if (*from == '/' && from[1] == '.' && (from[2] == '/' || from[2] == '\0'))
            from += 2;
        else
            *to++ = *from++;
    }
    if (to == path)
        *to++ = '/';
    *to = '\0';
}

static char *absolute_path(const char *directory, const char *path)
{
    char *joined = NULL;
    if (path[0] == '/')
        joined = copy_string(path);
    else
        CHECK(asprintf(&joined, "%s/%s", directory, path) >= 0);
    tidy_path(joined);
    return joined;
}

/* A string, or the absolute path it means, as a new allocation. */
static int parse_string(const struct config_key *key, const struct toml_value *value,
                        const char *directory, char **string)
{
    bool is_path = key->type == CONFIG_TYPE_PATH || key->type == CONFIG_TYPE_PATHS;
    if (value->kind != TOML_STRING || value->string_bytes != strlen(value->string) ||
        (value->string_bytes == 0 && (key->limits.not_empty || key->type == CONFIG_TYPE_PATHS)))
        return refuse(key, value);
    if (is_path && value->string_bytes > 0 && !find_word(&key->limits, value))
        *string = absolute_path(directory, value->string);
    else
        *string = copy_string(value->string);
    if (is_utf8(*string))
        return 0;
    int rc = error_set(ERROR_USER, "expected UTF-8, found other bytes in \"%s\"", *string);
    free(*string);
    return rc;
}

static int set_string(const struct config_key *key, const struct toml_value *value,
                      const char *directory, char **field)
{
    char *string = NULL;
    int rc = parse_string(key, value, directory, &string);
    if (rc < 0)
        return rc;
    free(*field);
    *field = string;
    return 0;
}

static void release_list(struct config_strings *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->items[i]);
    free(list->items);
    *list = (struct config_strings){0};
}

static int set_list(const struct config_key *key, const struct toml_value *value,
                    const char *directory, struct config_strings *field)
{
    if (value->kind != TOML_ARRAY || (key->limits.not_empty && value->item_count == 0))
        return refuse(key, value);
    struct config_strings list = {0};
    if (value->item_count) {
        list.items = calloc(value->item_count, sizeof *list.items);
        CHECK(list.items != NULL);
    }
    for (; list.count < value->item_count; list.count++) {
        int rc = parse_string(key, &value->items[list.count], directory, &list.items[list.count]);
        if (rc < 0) {
            release_list(&list);
            return rc;
        }
    }
    release_list(field);
    *field = list;
    return 0;
}

int config_value_set(const struct config_key *key, const struct toml_value *value,
                     const char *directory, void *field)
{
    switch (key->type) {
    case CONFIG_TYPE_BOOL:
        if (value->kind != TOML_BOOLEAN)
            return refuse(key, value);
        *(bool *)field = value->boolean;
        return 0;
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_SIZE:
        return set_count(key, value, field);
    case CONFIG_TYPE_FLOAT:
        return set_float(key, value, field);
    case CONFIG_TYPE_PAIR:
        return set_pair(key, value, field);
    case CONFIG_TYPE_ENUM:
        return set_enum(key, value, field);
    case CONFIG_TYPE_STRING:
    case CONFIG_TYPE_PATH:
        return set_string(key, value, directory, field);
    case CONFIG_TYPE_STRINGS:
    case CONFIG_TYPE_PATHS:
        return set_list(key, value, directory, field);
    }
    CHECK(false);
    return -1;
}

void config_value_release(const struct config_key *key, void *field)
{
    switch (key->type) {
    case CONFIG_TYPE_STRING:
    case CONFIG_TYPE_PATH:
        free(*(char **)field);
        *(char **)field = NULL;
        break;
    case CONFIG_TYPE_STRINGS:
    case CONFIG_TYPE_PATHS:
        release_list(field);
        break;
    default:
        break;
    }
}

bool config_value_is_off(const struct config_key *key, const void *field)
{
    switch (key->type) {
    case CONFIG_TYPE_INT:
        return *(const uint64_t *)field == 0;
    case CONFIG_TYPE_FLOAT:
        return *(const double *)field == 0.0;
    case CONFIG_TYPE_PATHS:
        return ((const struct config_strings *)field)->count == 0;
    default:
        return false;
    }
}
