/*
 * Every configuration key, once. From this list come the fields of struct config, parsing and its
 * checks, the nearest-name suggestion, the effective file, and what a resumed run may change.
 * To add a key, add a line here and its line in examples/run.example.toml (a test compares them).
 *
 *     X(section, key, TYPE, default, LIMITS, RESUME, BITS, "one sentence")
 *
 * TYPE     field in struct config              in the file
 *   BOOL     bool                              true, false
 *   INT      uint64_t                          integer; words ("auto") where LIMITS names some
 *   SIZE     uint64_t bytes                    integer or "24GB"; words likewise
 *   FLOAT    double, finite                    float or integer
 *   PAIR     double[2]                         array of two numbers
 *   ENUM     enum config_<section>_<key>       one of the words
 *   STRING   char *                            string
 *   PATH     char *, absolute or ""            string, relative to the run file
 *   STRINGS  struct config_strings             array of strings
 *   PATHS    struct config_strings, absolute   array of strings, relative to the run file
 *
 * default  as written in the file; CONFIG_REQUIRED where there is none
 * RESUME   MAY_CHANGE (announced) or FIXED (a changed value refuses to resume), or FOLLOWS: the
 * value is derived from another key's and only that one is compared BITS     BITS if the value
 * takes part in the numbers of the run, else NO_BITS. FIXED and BITS together make the
 * configuration hash in every commit record.
 *
 * Decisions of the RESUME column beyond the obvious. betas, eps and no_decay may change as weight
 * decay may: they are scalars of the coming updates, and no stored state depends on them.
 * offload_dir is fixed because an empty directory in its place would look like a run without a
 * commit; verify_writes because the number of slots is fixed when the store is created. Validation
 * files are evaluation and may change; val_fraction takes training data away and may not.
 */
#ifndef LAUNCHER_CONFIG_KEYS_H
#define LAUNCHER_CONFIG_KEYS_H

#define CONFIG_KEYS(X)                                                                             \
    X(run, output_dir, PATH, "\"runs/example\"", NOT_EMPTY, MAY_CHANGE, NO_BITS,                   \
      "Where logs, metrics, exports and, unless offload_dir says otherwise, the store go.")        \
    X(run, seed, INT, "42", FROM(0), FIXED, BITS,                                                  \
      "Seed of every random number: initialisation and data order.")                               \
    X(run, resume, ENUM, "\"auto\"", ONE_OF(run_resume), MAY_CHANGE, NO_BITS,                      \
      "auto: continue if a commit exists; never: refuse if one exists.")                           \
    X(run, stop_after_step, INT, "0", FROM(0), MAY_CHANGE, NO_BITS,                                \
      "Stop cleanly after this step without changing the schedule; 0 = off.")                      \
    X(run, watchdog, BOOL, "true", ANY, MAY_CHANGE, NO_BITS,                                       \
      "false: no deadlines, for debuggers.")                                                       \
    X(model, path, PATH, CONFIG_REQUIRED, NOT_EMPTY, FIXED, BITS,                                  \
      "Hugging Face folder: config.json, *.safetensors, tokenizer.json.")                          \
    X(model, init, ENUM, "\"pretrained\"", ONE_OF(model_init), FIXED, BITS,                        \
      "pretrained: read the weights; random: only config.json is read.")                           \
    X(model, dtype, ENUM, "\"bfloat16\"", ONE_OF(model_dtype), FIXED, BITS,                        \
      "Compute dtype; master weights are float32 with either.")                                    \
    X(model, tokenizer, PATH, "\"\"", WORDS(model_tokenizer), FIXED, BITS,                         \
      "Empty: tokenizer.json of model.path; bytes: the built-in one; or a tokenizer.json.")        \
    X(data, train, PATHS, CONFIG_REQUIRED, NOT_EMPTY, FIXED, BITS,                                 \
      "Training files: .txt, .jsonl, .parquet, token shards (.bin of llm.c or nanoGPT).")          \
    X(data, validation, PATHS, "[]", ANY, MAY_CHANGE, NO_BITS,                                     \
      "Validation files, or val_fraction.")                                                        \
    X(data, val_fraction, FLOAT, "0.0", BETWEEN_BELOW(0, 1), FIXED, BITS,                          \
      "Part of the training data set aside for validation, or validation.")                        \
    X(data, format, ENUM, "\"auto\"", ONE_OF(data_format), FIXED, BITS,                            \
      "How the files are read; auto: by names, magic numbers and keys of the records.")            \
    X(data, packing, BOOL, "true", ANY, FIXED, BITS,                                               \
      "Pack documents into sequences; attention and labels never cross a document.")               \
    X(data, overlong, ENUM, "\"truncate\"", ONE_OF(data_overlong), FIXED, BITS,                    \
      "Conversations longer than seq_len: cut off there, or left out; text is never either.")      \
    X(data, shuffle, BOOL, "true", ANY, FIXED, BITS,                                               \
      "Shuffle each epoch, as a pure function of seed and epoch.")                                 \
    X(data, cache_dir, PATH, "\"\"", ANY, MAY_CHANGE, NO_BITS,                                     \
      "Where tokenized shards are kept; empty: output_dir/cache.")                                 \
    X(training, seq_len, INT, "2048", RANGE(1, 16777216), FIXED, BITS, "Tokens per sequence.")     \
    X(training, micro_batch_size, INT, "1", RANGE(1, 1048576), FIXED, BITS,                        \
      "Sequences per microbatch.")                                                                 \
    X(training, gradient_accumulation_steps, INT, "8", RANGE(1, 1048576), FIXED, BITS,             \
      "Microbatches per step, or global_batch_size.")                                              \
    X(training, global_batch_size, INT, CONFIG_UNSET, RANGE(1, 1099511627776), FOLLOWS, NO_BITS,   \
      "Sequences per step, a multiple of micro_batch_size.")                                       \
    X(training, steps, INT, "1000", FROM(1), MAY_CHANGE, BITS,                                     \
      "Length of the run in optimizer steps, or epochs.")                                          \
    X(training, epochs, FLOAT, CONFIG_UNSET, ABOVE(0, 1e9), MAY_CHANGE, BITS,                      \
      "Length of the run in passes over the training data.")                                       \
    X(training, max_grad_norm, FLOAT, "1.0", BETWEEN(0, 1e30), MAY_CHANGE, BITS,                   \
      "Global gradient norm above which gradients are scaled down; 0 = off.")                      \
    X(training, activation_checkpointing, INT, "\"auto\"",                                         \
      WORDS_OR(activation_checkpointing, "every-", 1, 65536), MAY_CHANGE, NO_BITS,                 \
      "auto: what fits and costs least; full, every-N or none; never changes a bit.")              \
    X(training, skip_nonfinite, BOOL, "true", ANY, MAY_CHANGE, BITS,                               \
      "Skip a step whose gradient norm is not finite, else stop.")                                 \
    X(training, spike, ENUM, "\"off\"", ONE_OF(training_spike), MAY_CHANGE, BITS,                  \
      "What to do with a loss or norm above spike_factor x its running median.")                   \
    X(training, spike_factor, FLOAT, "10.0", ABOVE(1, 1e30), MAY_CHANGE, BITS,                     \
      "How far above the running median is a spike.")                                              \
    X(optimizer, name, STRING, "\"adamw\"", NOT_EMPTY, FIXED, BITS, "The update rule.")            \
    X(optimizer, learning_rate, FLOAT, "1e-05", BETWEEN(0, 1e6), MAY_CHANGE, BITS,                 \
      "Learning rate after warm-up, before decay.")                                                \
    X(optimizer, betas, PAIR, "[0.9, 0.95]", BETWEEN_BELOW(0, 1), MAY_CHANGE, BITS,                \
      "Decay of the first and second moment.")                                                     \
    X(optimizer, eps, FLOAT, "1e-08", BETWEEN(1.2e-38, 1e6), MAY_CHANGE, BITS,                     \
      "Added to the root of the second moment.")                                                   \
    X(optimizer, weight_decay, FLOAT, "0.1", BETWEEN(0, 1e6), MAY_CHANGE, BITS,                    \
      "Decoupled weight decay.")                                                                   \
    X(optimizer, no_decay, STRINGS, "[\"*norm*\", \"*bias\"]", ANY, MAY_CHANGE, BITS,              \
      "Tensor names without weight decay; one-dimensional tensors are always exempt.")             \
    X(optimizer, compression, ENUM, "\"none\"", ONE_OF(optimizer_compression), FIXED, BITS,        \
      "How the optimizer state is stored.")                                                        \
    X(optimizer, workers, INT, "\"auto\"", WORDS_OR(auto, NULL, 1, 64), MAY_CHANGE, NO_BITS,       \
      "Optimizer processes; auto: one per NUMA node.")                                             \
    X(optimizer, recompute, FLOAT, "0.0", BETWEEN(0, 1), MAY_CHANGE, NO_BITS,                      \
      "Part of the 4096-element blocks that another core computes once more; 0 = off.")            \
    X(lr_scheduler, type, ENUM, "\"cosine\"", ONE_OF(lr_scheduler_type), MAY_CHANGE, BITS,         \
      "Shape of the learning rate after warm-up.")                                                 \
    X(lr_scheduler, warmup_steps, INT, "30", FROM(0), MAY_CHANGE, BITS,                            \
      "Steps of linear warm-up, or warmup_ratio; at least steps warns and runs as written.")       \
    X(lr_scheduler, warmup_ratio, FLOAT, CONFIG_UNSET, BETWEEN(0, 1), MAY_CHANGE, BITS,            \
      "Linear warm-up as a part of the run.")                                                      \
    X(lr_scheduler, min_lr_ratio, FLOAT, "0.1", BETWEEN(0, 1), MAY_CHANGE, BITS,                   \
      "Where the decay ends, as a part of the learning rate.")                                     \
    X(lr_scheduler, decay_ratio, FLOAT, "0.1", BETWEEN(0, 1), MAY_CHANGE, BITS,                    \
      "wsd: the last part of the run, in which the learning rate falls.")                          \
    X(memory, device, INT, "\"auto\"", WORDS_OR(device, "cuda:", 0, 127), MAY_CHANGE, NO_BITS,     \
      "auto, cpu or cuda:N; another device starts a new lineage of bits.")                         \
    X(memory, max_vram, SIZE, "\"auto\"", WORDS_OR(auto, NULL, 1, INT64_MAX), MAY_CHANGE, NO_BITS, \
      "Device memory the run may use.")                                                            \
    X(memory, max_ram, SIZE, "\"auto\"", WORDS_OR(auto, NULL, 1, INT64_MAX), MAY_CHANGE, NO_BITS,  \
      "RAM the run may use; auto: 80 % of what the machine and the cgroup leave.")                 \
    X(memory, offload_dir, PATHS, "[]", ANY, FIXED, NO_BITS,                                       \
      "One or more directories for the store; empty: output_dir/store.")                           \
    X(memory, durability, INT, "\"step\"", WORDS_OR(durability, NULL, 1, 1000000), MAY_CHANGE,     \
      NO_BITS, "Commit every step, or every K steps.")                                             \
    X(memory, verify_writes, BOOL, "true", ANY, FIXED, NO_BITS,                                    \
      "true: three slots per page, read back before reuse; false: two slots.")                     \
    X(memory, page_elements, INT, "4194304", PAGE_SIZE(4096, 1073741824), FIXED, BITS,             \
      "Elements per page, 4096 x 2^k; fixed when the store is created.")                           \
    X(memory, io_engine, ENUM, "\"auto\"", ONE_OF(memory_io_engine), MAY_CHANGE, NO_BITS,          \
      "How the store's files are read and written.")                                               \
    X(memory, prefetch, INT, "\"predict\"", WORDS_OR(prefetch, NULL, 1, 1000000), MAY_CHANGE,      \
      NO_BITS, "Pages read ahead: predicted, or a fixed number.")                                  \
    X(memory, threads, INT, "\"auto\"", WORDS_OR(auto, NULL, 1, 1024), MAY_CHANGE, NO_BITS,        \
      "Compute threads of the CPU device.")                                                        \
    X(memory, drive_tbw, INT, "0", RANGE(0, 1000000000), MAY_CHANGE, NO_BITS,                      \
      "Rating of the drive in terabytes written; 0 = not known.")                                  \
    X(checkpoint, export_interval, INT, "0", FROM(0), MAY_CHANGE, NO_BITS,                         \
      "Steps between exports to output_dir/export/step-N; 0 = only at the end.")                   \
    X(checkpoint, keep, INT, "2", RANGE(1, 1000000), MAY_CHANGE, NO_BITS, "Exports kept.")         \
    X(checkpoint, export_dtype, ENUM, "\"auto\"", ONE_OF(checkpoint_export_dtype), MAY_CHANGE,     \
      NO_BITS, "auto: per tensor, the dtype of the source model.")                                 \
    X(eval, interval, INT, "0", FROM(0), MAY_CHANGE, NO_BITS,                                      \
      "Steps between evaluations; 0 = off.")                                                       \
    X(eval, sequences, INT, "64", RANGE(1, 1073741824), MAY_CHANGE, NO_BITS,                       \
      "Validation sequences per evaluation.")                                                      \
    X(eval, sample_prompts, STRINGS, "[]", ANY, MAY_CHANGE, NO_BITS,                               \
      "Prompts continued at each evaluation.")                                                     \
    X(eval, sample_tokens, INT, "64", RANGE(1, 1048576), MAY_CHANGE, NO_BITS,                      \
      "Tokens generated per prompt.")                                                              \
    X(log, interval, INT, "1", FROM(1), MAY_CHANGE, NO_BITS, "Steps between progress lines.")      \
    X(log, progress, ENUM, "\"auto\"", ONE_OF(log_progress), MAY_CHANGE, NO_BITS,                  \
      "auto: a bar on a terminal, else plain lines.")                                              \
    X(log, trace, BOOL, "false", ANY, MAY_CHANGE, NO_BITS,                                         \
      "Write trace.json (Chrome trace format) of every stage.")                                    \
    X(log, http, STRING, "\"\"", ANY, MAY_CHANGE, NO_BITS,                                         \
      "127.0.0.1:PORT for a status page and /metrics; empty = off.")                               \
    X(log, max_size, SIZE, "100000000", RANGE(65536, INT64_MAX), MAY_CHANGE, NO_BITS,              \
      "Largest log of a worker; two are kept.")

/*
 * Alternatives: X(section, key, alternative). Giving one removes the default of the other; giving
 * both in one file is an error (unless one is off: 0 or an empty list). On the command line, giving
 * one also replaces the other where the file gave it.
 */
#define CONFIG_ALTERNATIVES(X)                                                                     \
    X(training, gradient_accumulation_steps, global_batch_size)                                    \
    X(training, steps, epochs)                                                                     \
    X(lr_scheduler, warmup_steps, warmup_ratio)                                                    \
    X(data, validation, val_fraction)

/* The words of ENUM keys, CONFIG_ENUM_<section>_<key>: X(constant, "word"). */
#define CONFIG_ENUM_run_resume(X)                                                                  \
    X(CONFIG_RESUME_AUTO, "auto")                                                                  \
    X(CONFIG_RESUME_NEVER, "never")
#define CONFIG_ENUM_model_init(X)                                                                  \
    X(CONFIG_INIT_PRETRAINED, "pretrained")                                                        \
    X(CONFIG_INIT_RANDOM, "random")
#define CONFIG_ENUM_model_dtype(X)                                                                 \
    X(CONFIG_DTYPE_BFLOAT16, "bfloat16")                                                           \
    X(CONFIG_DTYPE_FLOAT32, "float32")
#define CONFIG_ENUM_data_format(X)                                                                 \
    X(CONFIG_FORMAT_AUTO, "auto")                                                                  \
    X(CONFIG_FORMAT_TEXT, "text")                                                                  \
    X(CONFIG_FORMAT_PROMPT_COMPLETION, "prompt-completion")                                        \
    X(CONFIG_FORMAT_CHAT, "chat")                                                                  \
    X(CONFIG_FORMAT_TOKENS, "tokens")
#define CONFIG_ENUM_data_overlong(X)                                                               \
    X(CONFIG_OVERLONG_TRUNCATE, "truncate")                                                        \
    X(CONFIG_OVERLONG_DROP, "drop")
#define CONFIG_ENUM_training_spike(X)                                                              \
    X(CONFIG_SPIKE_OFF, "off")                                                                     \
    X(CONFIG_SPIKE_REDO, "redo")                                                                   \
    X(CONFIG_SPIKE_SKIP, "skip")
#define CONFIG_ENUM_optimizer_compression(X)                                                       \
    X(CONFIG_COMPRESSION_NONE, "none")                                                             \
    X(CONFIG_COMPRESSION_LOSSLESS, "lossless")                                                     \
    X(CONFIG_COMPRESSION_8BIT, "8bit")                                                             \
    X(CONFIG_COMPRESSION_DYNAMIC, "dynamic")                                                       \
    X(CONFIG_COMPRESSION_MINIMUM, "minimum")
/* in the order of enum schedule_type */
#define CONFIG_ENUM_lr_scheduler_type(X)                                                           \
    X(CONFIG_SCHEDULE_CONSTANT, "constant")                                                        \
    X(CONFIG_SCHEDULE_LINEAR, "linear")                                                            \
    X(CONFIG_SCHEDULE_COSINE, "cosine")                                                            \
    X(CONFIG_SCHEDULE_WSD, "wsd")
#define CONFIG_ENUM_memory_io_engine(X)                                                            \
    X(CONFIG_IO_ENGINE_AUTO, "auto")                                                               \
    X(CONFIG_IO_ENGINE_IO_URING, "io_uring")                                                       \
    X(CONFIG_IO_ENGINE_SYNC, "sync")
#define CONFIG_ENUM_checkpoint_export_dtype(X)                                                     \
    X(CONFIG_EXPORT_DTYPE_AUTO, "auto")                                                            \
    X(CONFIG_EXPORT_DTYPE_FLOAT32, "float32")                                                      \
    X(CONFIG_EXPORT_DTYPE_BFLOAT16, "bfloat16")                                                    \
    X(CONFIG_EXPORT_DTYPE_FLOAT16, "float16")
#define CONFIG_ENUM_log_progress(X)                                                                \
    X(CONFIG_PROGRESS_AUTO, "auto")                                                                \
    X(CONFIG_PROGRESS_BAR, "bar")                                                                  \
    X(CONFIG_PROGRESS_PLAIN, "plain")                                                              \
    X(CONFIG_PROGRESS_NONE, "none")

/* The words an INT, SIZE or PATH key takes beside its values: X(value, "word"). */
#define CONFIG_WORDS_auto(X)       X(CONFIG_AUTO, "auto")
#define CONFIG_WORDS_prefetch(X)   X(CONFIG_AUTO, "predict")
#define CONFIG_WORDS_durability(X) X(1, "step")
#define CONFIG_WORDS_device(X)                                                                     \
    X(CONFIG_AUTO, "auto")                                                                         \
    X(CONFIG_DEVICE_CPU, "cpu")
#define CONFIG_WORDS_activation_checkpointing(X)                                                   \
    X(CONFIG_AUTO, "auto")                                                                         \
    X(CONFIG_CHECKPOINTING_FULL, "full")                                                           \
    X(CONFIG_CHECKPOINTING_NONE, "none")
#define CONFIG_WORDS_model_tokenizer(X) X(0, "bytes")

#endif
