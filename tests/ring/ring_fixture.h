/* A small model's plan with pools and rings for all roles, as the launcher would make it. */
#ifndef TESTS_RING_FIXTURE_H
#define TESTS_RING_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/plan.h"
#include "procs/error.h"

enum { FIXTURE_PLAN_BYTES = 65536, FIXTURE_GENERATION = 7, FIXTURE_FRAMES = 6, FIXTURE_DEPTH = 8 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FIXTURE_SANITIZED = 1 };
#else
enum { FIXTURE_SANITIZED = 0 };
#endif

struct fixture {
    struct model_layout layout;
    union {
        struct plan plan;
        unsigned char bytes[FIXTURE_PLAN_BYTES];
    } at;
};

static inline void fixture_layout(struct fixture *f)
{
    static const char json[] =
        "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": "
        "64,"
        " \"intermediate_size\": 160, \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
        " \"num_key_value_heads\": 2, \"vocab_size\": 300, \"max_position_embeddings\": 128}";
    if (model_config_parse(&f->at.plan.model, json, sizeof json - 1, "fixture") < 0 ||
        model_layout_init(&f->layout, &f->at.plan.model, 4096) < 0)
        fail_msg("fixture: %s", error_text());
}

static inline int fixture_is_pool(int region)
{
    return region >= REGION_MICROBATCH_POOL;
}

/* Everything but the places, which plan_place_regions() fills in once the texts are complete. */
static inline void fixture_fill(struct fixture *f, uint32_t opt_workers)
{
    struct plan *plan = &f->at.plan;
    memset(f, 0, sizeof *f);
    fixture_layout(f);
    plan->magic = PLAN_MAGIC;
    plan->layout_version = PLAN_LAYOUT_VERSION;
    plan->bytes = sizeof *plan;
    plan->generation = FIXTURE_GENERATION;
    plan->opt_workers = opt_workers;
    plan->page_elements = 4096;
    (void)snprintf(plan->token, sizeof plan->token, "%032x", 0x1234);
    for (int r = 0; r < REGION_COUNT; r++)
        if (fixture_is_pool(r))
            plan->pools[r] = (struct plan_pool){16384, plan_frame_stride(16384), FIXTURE_FRAMES};
    for (int r = 0; r < RING_COUNT; r++)
        plan->ring_depth[r] = FIXTURE_DEPTH;
}

static inline void fixture_init(struct fixture *f, uint32_t opt_workers)
{
    fixture_fill(f, opt_workers);
    plan_place_regions(&f->at.plan, &f->layout);
}

static inline void fixture_destroy(struct fixture *f)
{
    model_layout_destroy(&f->layout);
}

/* The exit status of a child, or 1000 + the signal that ended it. */
static inline int fixture_wait(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        ;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* A deterministic source of numbers for fuzzing (splitmix64). */
static inline uint64_t fixture_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline void fixture_expect_text(const char *part)
{
    if (!strstr(error_text(), part))
        fail_msg("expected an error with \"%s\", found \"%s\"", part, error_text());
}

#endif
