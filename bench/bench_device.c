/*
 * Forward and backward of a Llama on the CPU device, without the pipeline around it.
 *
 *     bench_device [threads] [hidden layers heads intermediate vocabulary] [batch seq_len]
 * [repeats]
 *
 * Prints one JSON line per repeat: tokens/s with all intermediates kept and with recomputation, and
 * GFLOP/s by 6 x parameters x tokens.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu_worker/layers.h"
#include "model/layout.h"
#include "procs/clock.h"
#include "procs/error.h"

struct bench {
    struct model_layout layout;
    struct device *device;
    struct layers *layers;
    struct layers_batch batch;
    uint64_t rows;
    compute_t **weights, **x;
    float **gradients;
};

static uint64_t argument(int argc, char **argv, int index, uint64_t otherwise)
{
    return index < argc ? strtoull(argv[index], NULL, 10) : otherwise;
}

static void must(int rc)
{
    if (rc < 0) {
        fprintf(stderr, "%s\n", error_text());
        exit(1);
    }
}

static void fill(float *values, uint64_t n, float scale)
{
    uint64_t state = 88172645463325252ull;
    for (uint64_t i = 0; i < n; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        values[i] = ((float)(state >> 40) / 16777216.0f - 0.5f) * 2 * scale;
    }
}

static void make_model(struct bench *b, int argc, char **argv)
{
    char json[1024];
    struct model_config config;
    uint64_t heads = argument(argc, argv, 4, 6);
    int bytes =
        snprintf(json, sizeof json,
                 "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],"
                 "\"hidden_size\":%llu,\"num_hidden_layers\":%llu,"
                 "\"num_attention_heads\":%llu,\"num_key_value_heads\":%llu,"
                 "\"intermediate_size\":%llu,\"vocab_size\":%llu,"
                 "\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-5,"
                 "\"rope_theta\":10000.0,\"tie_word_embeddings\":true}",
                 (unsigned long long)argument(argc, argv, 2, 384),
                 (unsigned long long)argument(argc, argv, 3, 8), (unsigned long long)heads,
                 (unsigned long long)heads, (unsigned long long)argument(argc, argv, 5, 1024),
                 (unsigned long long)argument(argc, argv, 6, 16384));
    must(model_config_parse(&config, json, (uint64_t)bytes, "bench"));
    must(model_layout_init(&b->layout, &config, MODEL_PAGE_ELEMENTS_DEFAULT));
}

static void make_batch(struct bench *b, uint64_t seq_len)
{
    int32_t *ids = malloc(4 * b->rows * sizeof *ids);
    if (ids == NULL)
        abort();
    for (uint64_t i = 0; i < b->rows; i++) {
        ids[i] = (int32_t)(i * 7919 % b->layout.config.vocab_size);
        ids[b->rows + i] = (int32_t)((i + 1) * 7919 % b->layout.config.vocab_size);
        ids[2 * b->rows + i] = (int32_t)(i % seq_len);
        ids[3 * b->rows + i] = 0;
    }
    b->batch = (struct layers_batch){.tokens = ids,
                                     .labels = ids + b->rows,
                                     .position = ids + 2 * b->rows,
                                     .document_start = ids + 3 * b->rows};
}

static void make_arrays(struct bench *b)
{
    uint32_t n = b->layout.n_layers;
    b->weights = calloc(n, sizeof *b->weights);
    b->gradients = calloc(n, sizeof *b->gradients);
    b->x = calloc(n, sizeof *b->x);
    for (uint32_t l = 0; l < n; l++) {
        uint64_t elements = b->layout.layers[l].elements;
        float *host = malloc(elements * sizeof *host);
        b->weights[l] = b->device->ops->alloc(b->device, elements * b->device->compute_bytes);
        b->gradients[l] = b->device->ops->alloc(b->device, elements * sizeof(float));
        b->x[l] = b->device->ops->alloc(b->device, layers_activation_bytes(b->layers));
        if (host == NULL || b->weights[l] == NULL || b->gradients[l] == NULL || b->x[l] == NULL)
            abort();
        fill(host, elements, 0.04f);
        b->device->ops->load(b->device, b->weights[l], host, DEVICE_HOST_F32, elements);
        b->device->ops->zero(b->device, b->gradients[l], elements * sizeof(float));
        free(host);
    }
}

/* seconds of forward, head, backward; CPU seconds of all threads */
struct times {
    double forward, head, backward, cpu;
};

static double cpu_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* cannot fail for this clock */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct times run(struct bench *b, int saved)
{
    uint32_t blocks = (uint32_t)b->layout.config.n_layers;
    struct layers_head head = {.norm = b->weights[blocks + 1],
                               .matrix = b->weights[0],
                               .norm_gradient = b->gradients[blocks + 1],
                               .matrix_gradient = b->gradients[0]};
    double loss, cpu = cpu_seconds();
    uint64_t t0 = clock_now_ns();
    layers_embedding_forward(b->layers, b->weights[0], &b->batch, b->x[0]);
    for (uint32_t l = 0; l < blocks; l++)
        layers_block_forward(b->layers, l + 1, b->weights[l + 1], &b->batch, b->x[l], b->x[l + 1],
                             saved ? (int64_t)l : LAYERS_NO_SLOT);
    uint64_t t1 = clock_now_ns();
    layers_head(b->layers, &head, &b->batch, b->x[blocks], 1.0 / (double)b->rows, b->x[blocks],
                &loss);
    uint64_t t2 = clock_now_ns();
    for (uint32_t l = blocks; l-- > 0;)
        layers_block_backward(b->layers, l + 1, b->weights[l + 1], b->gradients[l + 1], &b->batch,
                              b->x[l], b->x[blocks], saved ? (int64_t)l : LAYERS_NO_SLOT);
    layers_embedding_backward(b->layers, b->gradients[0], &b->batch, b->x[blocks]);
    uint64_t t3 = clock_now_ns();
    return (struct times){1e-9 * (double)(t1 - t0), 1e-9 * (double)(t2 - t1),
                          1e-9 * (double)(t3 - t2), cpu_seconds() - cpu};
}

static void report(const struct bench *b, const char *name, struct times t)
{
    double seconds = t.forward + t.head + t.backward;
    printf("{\"name\":\"%s\",\"tokens_per_s\":%.0f,\"gflops\":%.1f,\"forward_s\":%.4f,"
           "\"head_s\":%.4f,\"backward_s\":%.4f,\"cpu_s\":%.4f}\n",
           name, (double)b->rows / seconds,
           6e-9 * (double)b->layout.parameters * (double)b->rows / seconds, t.forward, t.head,
           t.backward, t.cpu);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    uint64_t batch = argument(argc, argv, 7, 8), seq_len = argument(argc, argv, 8, 512);
    make_model(&b, argc, argv);
    b.rows = batch * seq_len;
    must(device_cpu_open(&b.device, DEVICE_F32, (uint32_t)argument(argc, argv, 1, 2)));
    must(layers_init(&b.layers, b.device, &b.layout,
                     &(struct layers_shape){.microbatch_size = batch,
                                            .seq_len = seq_len,
                                            .saved_slots = b.layout.config.n_layers}));
    make_batch(&b, seq_len);
    make_arrays(&b);
    fprintf(stderr, "%s, %.1f M parameters\n", b.device->ops->lineage(b.device),
            1e-6 * (double)b.layout.parameters);
    for (uint64_t i = 0; i < argument(argc, argv, 9, 5); i++) {
        report(&b, "saved", run(&b, 1));
        report(&b, "recomputed", run(&b, 0));
    }
    return 0;
}
