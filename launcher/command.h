/* The commands of mtlaunch. Each returns the exit status; errors are told on stderr. */
#ifndef LAUNCHER_COMMAND_H
#define LAUNCHER_COMMAND_H

#define MTLAUNCH_VERSION "0.1.0"

struct arguments {
    int count;
    char **items; /* behind the command's name */
};

/* Finds the command that argv names and runs it. */
int command_main(int argc, char **argv);

/* command_train.c: RUN.toml [--section.key=value ...] */
int command_train(const struct arguments *a);
int command_validate(const struct arguments *a);
/* command_tokenize.c: likewise */
int command_tokenize(const struct arguments *a);
/* command_infer.c */
int command_generate(const struct arguments *a);
int command_eval(const struct arguments *a);
/* command_store.c */
int command_export(const struct arguments *a);
int command_digest(const struct arguments *a);
int command_stop(const struct arguments *a);
int command_clean(const struct arguments *a);
/* command_scrub.c */
int command_scrub(const struct arguments *a);

/* Prints "mtlaunch: error_text()" and returns the exit status of the error. */
int command_fail(void);

/* The value of "--name VALUE" or "--name=VALUE"; NULL when absent. Marks what it took. */
struct options {
    const struct arguments *a;
    unsigned char taken[256];
};
int options_open(struct options *o, const struct arguments *a);
const char *options_value(struct options *o, const char *name);
int options_u64(struct options *o, const char *name, unsigned long long fallback,
                unsigned long long *out);
int options_double(struct options *o, const char *name, double fallback, double *out);
/* The next argument that is no option; NULL when there is none. */
const char *options_positional(struct options *o);
/* For commands that take one argument and no option; `usage` names it. */
int options_only(const struct arguments *a, const char *usage, const char **path);
/* ERROR_USER when an argument was left over. */
int options_close(struct options *o);

#endif
