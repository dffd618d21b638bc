/* The effective configuration: a run file that says everything. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "launcher/config_key.h"
#include "procs/error.h"

/* Is the alternative of this key in force, so that this key may not be given as well? */
static bool is_displaced(int ordinal, const struct config *config)
{
    int other = config_key_alternative(ordinal);
    if (other == CONFIG_ORDINAL_NONE)
        return false;
    if (config_key_table[ordinal].change == CONFIG_CHANGE_FOLLOWS)
        return true;
    const struct config_key *other_key = &config_key_table[other];
    if (other_key->change == CONFIG_CHANGE_FOLLOWS)
        return false;
    bool other_is_off = config_value_is_off(other_key, config_key_value(other_key, config));
    bool is_off = config_value_is_off(&config_key_table[ordinal],
                                      config_key_value(&config_key_table[ordinal], config));
    return !other_is_off || (is_off && ordinal > other);
}

static void write_key(int ordinal, const struct config *config, FILE *out)
{
    const struct config_key *key = &config_key_table[ordinal];
    if (is_displaced(ordinal, config)) {
        const struct config_key *other = &config_key_table[config_key_alternative(ordinal)];
        fprintf(out, "# %s: %s is in force. %s\n", key->name, other->name, key->help);
        return;
    }
    fprintf(out, "%s = ", key->name);
    config_value_print(key, config_key_value(key, config), out);
    fprintf(out, "  # %s\n", key->help);
}

static void write_all(const struct config *config, FILE *out)
{
    const char *section = "";
    fputs("# The effective configuration of this run, written by mtlaunch.\n", out);
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        if (strcmp(section, config_key_table[i].section) != 0) {
            section = config_key_table[i].section;
            fprintf(out, "\n[%s]\n", section);
        }
        write_key(i, config, out);
    }
}

int config_write(const struct config *config, const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    FILE *out = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!out) {
        int why = errno;
        if (fd >= 0)
            (void)close(fd); /* nothing was written */
        return error_set(ERROR_FAILED, "%s: cannot be written: %s", path, strerror(why));
    }
    write_all(config, out);
    bool failed = fflush(out) != 0 || ferror(out) || fsync(fileno(out)) != 0;
    int code = errno;
    if (fclose(out) != 0) {
        failed = true;
        code = errno;
    }
    if (failed)
        return error_set(ERROR_FAILED, "%s: cannot be written: %s", path, strerror(code));
    return 0;
}
