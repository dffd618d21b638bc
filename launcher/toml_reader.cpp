// The one C++ file: toml++ behind the C face of toml_reader.h. Exceptions end here.

#include "launcher/toml_reader.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

// toml++ 3.3 guards its parser with assertions that a malformed file can reach ("[&" is one: issue
// 294 of marzer/tomlplusplus). An abort, or with NDEBUG undefined behaviour, is no answer to a
// typing error, so here a failed assertion is thrown, and becomes an error like any other.
namespace
{
struct parser_assertion {
};
[[noreturn]] void throw_assertion()
{
    throw parser_assertion{};
}
} // namespace
#undef NDEBUG
#define TOML_ASSERT(condition) ((condition) ? (void)0 : throw_assertion())
#include <toml++/toml.h>

extern "C" {
#include "procs/error.h"
}

namespace
{

// A run file is a few KiB; what is larger is another file given by mistake.
constexpr size_t file_bytes_max = 1u << 20;
// toml++ destroys a tree recursively: a name of 500000 parts would overflow the stack.
constexpr unsigned dots_in_name_max = 64;

int refuse_at(const char *name, const toml::source_position &place, const char *what)
{
    return error_set(ERROR_USER, "%s:%u:%u: %s", name, place.line, place.column, what);
}

// A dotted name is deep if it has too many dots outside quotes and comments. Everything resets at
// the end of a line, so that a quote gone astray (in a multi-line string, which no key needs)
// cannot hide the rest of the file.
bool has_deep_name(std::string_view text, toml::source_position &place)
{
    unsigned dots = 0;
    char quote = 0;
    bool in_comment = false;
    place = {1, 0};
    for (size_t i = 0; i < text.size(); i++) {
        char c = text[i];
        place.column++;
        if (c == '\n') {
            place = {place.line + 1, 0};
            dots = 0;
            quote = 0;
            in_comment = false;
        } else if (in_comment) {
            continue;
        } else if (quote) {
            if (c == '\\' && quote == '"')
                i++;
            else if (c == quote)
                quote = 0;
        } else if (c == '"' || c == '\'') {
            quote = c;
        } else if (c == '#') {
            in_comment = true;
        } else if (std::strchr("=,[]{}", c)) {
            dots = 0;
        } else if (c == '.' && ++dots > dots_in_name_max) {
            return true;
        }
    }
    return false;
}

const char *other_kind(toml::node_type type)
{
    switch (type) {
    case toml::node_type::date:
        return "a date";
    case toml::node_type::time:
        return "a time";
    case toml::node_type::date_time:
        return "a date and time";
    case toml::node_type::table:
        return "a table";
    case toml::node_type::array:
        return "an array";
    default:
        return "an unknown kind of value";
    }
}

toml_value scalar_value(const toml::node &node)
{
    toml_value value{};
    value.kind = TOML_OTHER;
    if (const auto *string = node.as_string()) {
        value.kind = TOML_STRING;
        value.string = string->get().c_str();
        value.string_bytes = string->get().size();
    } else if (const auto *integer = node.as_integer()) {
        value.kind = TOML_INTEGER;
        value.integer = integer->get();
        value.number = static_cast<double>(value.integer);
    } else if (const auto *number = node.as_floating_point()) {
        value.kind = TOML_FLOAT;
        value.number = number->get();
    } else if (const auto *boolean = node.as_boolean()) {
        value.kind = TOML_BOOLEAN;
        value.boolean = boolean->get();
    } else {
        value.string = other_kind(node.type());
    }
    return value;
}

int visit_value(const toml::node &node, toml_entry entry, toml_visit *visit, void *context)
{
    std::vector<toml_value> items;
    entry.value = scalar_value(node);
    if (const auto *array = node.as_array()) {
        for (const auto &item : *array)
            items.push_back(scalar_value(item));
        entry.value = toml_value{};
        entry.value.kind = TOML_ARRAY;
        entry.value.items = items.data();
        entry.value.item_count = items.size();
    }
    return visit(context, &entry);
}

int visit_section(const char *name, const toml::key &section, const toml::table &table,
                  toml_visit *visit, void *context)
{
    std::string section_name(section.str());
    toml_entry entry{};
    entry.section = section_name.c_str();
    entry.line = section.source().begin.line;
    entry.column = section.source().begin.column;
    if (int rc = visit(context, &entry); rc < 0)
        return rc;
    for (const auto &[key, node] : table) {
        std::string key_name(key.str());
        if (node.is_table() || node.is_array_of_tables())
            return refuse_at(name, key.source().begin,
                             ("[" + section_name + "] " + key_name +
                              ": a table inside a section; a run file has sections of plain keys")
                                 .c_str());
        entry.key = key_name.c_str();
        entry.line = key.source().begin.line;
        entry.column = key.source().begin.column;
        if (int rc = visit_value(node, entry, visit, context); rc < 0)
            return rc;
    }
    return 0;
}

bool trips_parser(std::string_view text)
{
    try {
        (void)toml::parse(text);
    } catch (const parser_assertion &) {
        return true;
    } catch (const toml::parse_error &) {
        // cut inside a value of several lines
    }
    return false;
}

// A failed assertion does not say where. The text up to and with its line fails the same way, and
// so does every longer one: find the first such line by bisection.
int refuse_unparsable(std::string_view text, const char *name)
{
    std::vector<size_t> line_ends;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '\n' || i + 1 == text.size())
            line_ends.push_back(i + 1);
    }
    size_t low = 0, high = line_ends.size();
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (trips_parser(text.substr(0, line_ends[middle])))
            high = middle;
        else
            low = middle + 1;
    }
    return refuse_at(name, {static_cast<toml::source_index>(low + 1), 1},
                     "not TOML; expected [section] or key = value");
}

int read_text(std::string_view text, const char *name, toml_visit *visit, void *context)
{
    toml::source_position place;
    if (has_deep_name(text, place))
        return refuse_at(name, place, "a name of too many parts; expected section.key");
    toml::table root;
    try {
        root = toml::parse(text);
    } catch (const parser_assertion &) {
        return refuse_unparsable(text, name);
    }
    for (const auto &[key, node] : root) {
        const toml::table *table = node.as_table();
        if (!table)
            return refuse_at(name, key.source().begin,
                             ("\"" + std::string(key.str()) +
                              "\" stands outside of any section; expected [section] first")
                                 .c_str());
        if (int rc = visit_section(name, key, *table, visit, context); rc < 0)
            return rc;
    }
    return 0;
}

// Runs `body` and turns what toml++ throws into an error of the user's.
template <typename Body> int without_exceptions(const char *name, Body body) noexcept
{
    try {
        return body();
    } catch (const toml::parse_error &error) {
        return refuse_at(name, error.source().begin, std::string(error.description()).c_str());
    } catch (const std::exception &error) {
        return error_set(ERROR_FAILED, "%s: %s", name, error.what());
    } catch (...) {
        return error_set(ERROR_FAILED, "%s: the TOML parser failed", name);
    }
}

int refuse_file(const char *path, int code)
{
    return error_set(ERROR_USER, "%s: cannot be read: %s", path, std::strerror(code));
}

int read_whole_file(const char *path, std::string &text)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOATIME); // reading is no use of a run
    if (fd < 0 && errno == EPERM)
        fd = open(path, O_RDONLY | O_CLOEXEC); // another user's file
    std::FILE *file = fd < 0 ? nullptr : fdopen(fd, "rb");
    if (!file)
        return refuse_file(path, errno);
    text.resize(file_bytes_max + 1);
    errno = 0;
    size_t bytes = std::fread(text.data(), 1, text.size(), file);
    int code = std::ferror(file) ? (errno ? errno : EIO) : 0;
    (void)std::fclose(file); // opened for reading: nothing to lose
    if (code)
        return refuse_file(path, code);
    if (bytes > file_bytes_max)
        return error_set(ERROR_USER, "%s: larger than 1 MiB; this is no run file", path);
    text.resize(bytes);
    return 0;
}

} // namespace

int toml_read_file(const char *path, toml_visit *visit, void *context)
{
    return without_exceptions(path, [=] {
        std::string text;
        int rc = read_whole_file(path, text);
        return rc < 0 ? rc : read_text(text, path, visit, context);
    });
}

int toml_read_text(const char *text, const char *name, toml_visit *visit, void *context)
{
    return without_exceptions(name, [=] { return read_text(text, name, visit, context); });
}

int toml_read_value(const char *text, toml_visit *visit, void *context)
{
    return without_exceptions("value", [=] {
        std::string document = "value = " + std::string(text) + "\n";
        toml::source_position place;
        if (has_deep_name(document, place))
            return 1;
        toml::table root;
        try {
            root = toml::parse(document);
        } catch (const toml::parse_error &) {
            return 1;
        } catch (const parser_assertion &) {
            return 1;
        }
        const toml::node *node = root.get("value");
        if (!node || root.size() != 1)
            return 1;
        toml_entry entry{};
        entry.section = "";
        entry.key = "";
        entry.line = entry.column = 1;
        return visit_value(*node, entry, visit, context);
    });
}
