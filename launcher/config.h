/*
 * The configuration: what a run file and the command line say, checked, in plain typed fields.
 *
 *     struct config config;
 *     if (config_load(&config, "run.toml", overrides, n) < 0 || config_refuse_missing(&config) < 0)
 *         ...                                        // error_text() says file:line:column
 *     ... config.training_seq_len ...
 *     config_destroy(&config);
 *
 * Fields are named <section>_<key> and typed by the list in config_keys.h, where every key, its
 * default, its limits and what it means stand. Nothing here writes but config_write(), and nothing
 * looks at models or data: that they fit the configuration is checked by those who read them.
 *
 * Of two alternatives only one is in force; the other reads 0 or empty:
 *
 *     training_gradient_accumulation_steps   always in force, global_batch_size is turned into it;
 *     training_global_batch_size             always their product with micro_batch_size
 *     training_steps                         0 when training_epochs > 0
 *     lr_scheduler_warmup_steps              0 when lr_scheduler_warmup_ratio > 0
 *     data_validation                        empty when data_val_fraction > 0
 */
#ifndef LAUNCHER_CONFIG_H
#define LAUNCHER_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "launcher/config_keys.h"

/* "auto", "predict": the program chooses. No limit of any key reaches it. */
#define CONFIG_AUTO UINT64_MAX
/* memory_device: CONFIG_AUTO, this, or the number of a CUDA device */
#define CONFIG_DEVICE_CPU (UINT64_MAX - 1)
/* training_activation_checkpointing: CONFIG_AUTO, or keep the input of every N-th layer */
#define CONFIG_CHECKPOINTING_NONE 0u
#define CONFIG_CHECKPOINTING_FULL 1u

#define CONFIG_ENUM_CONSTANT(constant, word) constant,
enum config_run_resume { CONFIG_ENUM_run_resume(CONFIG_ENUM_CONSTANT) };
enum config_model_init { CONFIG_ENUM_model_init(CONFIG_ENUM_CONSTANT) };
enum config_model_dtype { CONFIG_ENUM_model_dtype(CONFIG_ENUM_CONSTANT) };
enum config_data_format { CONFIG_ENUM_data_format(CONFIG_ENUM_CONSTANT) };
enum config_data_overlong { CONFIG_ENUM_data_overlong(CONFIG_ENUM_CONSTANT) };
enum config_training_spike { CONFIG_ENUM_training_spike(CONFIG_ENUM_CONSTANT) };
enum config_optimizer_compression { CONFIG_ENUM_optimizer_compression(CONFIG_ENUM_CONSTANT) };
enum config_lr_scheduler_type { CONFIG_ENUM_lr_scheduler_type(CONFIG_ENUM_CONSTANT) };
enum config_memory_io_engine { CONFIG_ENUM_memory_io_engine(CONFIG_ENUM_CONSTANT) };
enum config_checkpoint_export_dtype { CONFIG_ENUM_checkpoint_export_dtype(CONFIG_ENUM_CONSTANT) };
enum config_log_progress { CONFIG_ENUM_log_progress(CONFIG_ENUM_CONSTANT) };
#undef CONFIG_ENUM_CONSTANT

struct config_strings {
    char **items; /* count of them, owned */
    size_t count;
};

#define CONFIG_FIELD_BOOL(section, key)    bool section##_##key;
#define CONFIG_FIELD_INT(section, key)     uint64_t section##_##key;
#define CONFIG_FIELD_SIZE(section, key)    uint64_t section##_##key;
#define CONFIG_FIELD_FLOAT(section, key)   double section##_##key;
#define CONFIG_FIELD_PAIR(section, key)    double section##_##key[2];
#define CONFIG_FIELD_ENUM(section, key)    enum config_##section##_##key section##_##key;
#define CONFIG_FIELD_STRING(section, key)  char *section##_##key;
#define CONFIG_FIELD_PATH(section, key)    char *section##_##key;
#define CONFIG_FIELD_STRINGS(section, key) struct config_strings section##_##key;
#define CONFIG_FIELD_PATHS(section, key)   struct config_strings section##_##key;
#define CONFIG_FIELD(section, key, TYPE, fallback, limits, resume, bits, help)                     \
    CONFIG_FIELD_##TYPE(section, key)
struct config {
    CONFIG_KEYS(CONFIG_FIELD)
};

struct config_hash {
    uint64_t high, low;
};

/*
 * Reads a run file and the command line's overrides, "--section.key=value" each: the value is TOML,
 * or, where it is not, a bare string (--model.path=models/x); a single string does for a list.
 * Relative paths, an override's too, are relative to the run file. Then checks everything that can
 * be checked from the configuration alone.
 *
 * Returns 0, and `config` owns its strings until config_destroy(); or ERROR_USER
 * "path:line:column: [section] key: expected ..., found ..." (an override stands in for the place),
 * with a hint at the nearest name for an unknown one, and `config` holds nothing.
 */
int config_load(struct config *config, const char *path, char *const overrides[],
                size_t override_count);

/* Frees what config_load() allocated and zeroes the struct; a zeroed struct is fine. */
void config_destroy(struct config *config);

/*
 * Values that are valid but whose mechanism this build does not have: ERROR_USER names the value
 * and what is missing. Nothing is accepted and then ignored. Returns 0 if there is none.
 */
int config_refuse_missing(const struct config *config);

/*
 * Writes the effective configuration: every key, absolute paths, each with its sentence as comment
 * (an alternative that is not in force is in a comment). config_load() reads it back to equal
 * fields. The caller makes it durable. Returns 0 or ERROR_FAILED "path: what".
 */
int config_write(const struct config *config, const char *path);

/* Receives "[section] key: old -> new", without a newline. */
typedef void config_announce(void *context, const char *line);

/*
 * May a run that was started as `old` go on as `now`? The RESUME column of config_keys.h decides:
 * each changed key that may change is announced, the first that may not is ERROR_USER with both
 * values, and then nothing was announced. `announce` may be NULL.
 */
int config_compare_resume(const struct config *old, const struct config *now,
                          config_announce *announce, void *context);

/*
 * xxh3-128 over "section.key = value\n" of the keys that determine bits and may not change (FIXED
 * and BITS), in the order of config_keys.h; values as config_write() writes them.
 */
struct config_hash config_bits_hash(const struct config *config);

#endif
