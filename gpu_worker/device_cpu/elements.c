/* Operations that go over elements or rows independently: transfers, embedding, rope. */
#pragma GCC target("avx2,fma")
#include <string.h>

#include "gpu_worker/device_cpu/cpu.h"
#include "gpu_worker/device_cpu/simd.h"
#include "procs/check.h"

enum {
    ELEMENTS_PER_ITEM = 16384,
    ROWS_PER_ITEM = 32,
    COLUMNS_PER_ITEM = 64, /* of the embedding gradient: four cache lines of each row */
};

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t items_of(uint64_t length, uint64_t per_item)
{
    return (length + per_item - 1) / per_item;
}

/* One loop over elements: what every function below needs of its arrays. */
struct elements {
    uint64_t count;
    enum rounding rounding;
    enum device_host_dtype host;
    void *to;
    const void *from;
};

static void run_elements(struct device *device, struct elements *elements, threads_work work)
{
    elements->rounding = rounding_of(device);
    threads_run(cpu_of(device)->threads, items_of(elements->count, ELEMENTS_PER_ITEM), work,
                elements);
}

/* ---- transfers ---- */

static void load_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct elements *e = context;
    uint64_t start = item * ELEMENTS_PER_ITEM, end = least(start + ELEMENTS_PER_ITEM, e->count);
    float *to = e->to;
    if (e->host == DEVICE_HOST_F32) {
        const float *from = e->from;
        for (uint64_t i = start; i < end; i += LANES)
            v8_store(to + i, end - i, v8_round(v8_load(from + i, end - i), e->rounding));
        return;
    }
    const uint16_t *from = e->from;
    uint64_t i = start;
    for (; i + LANES <= end; i += LANES) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
        _mm256_storeu_ps(to + i, _mm256_castsi256_ps(bits));
    }
    for (; i < end; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

void cpu_load(struct device *device, compute_t *to, const void *from_host,
              enum device_host_dtype from, uint64_t elements)
{
    struct elements e = {.count = elements, .host = from, .to = cpu_floats(to), .from = from_host};
    run_elements(device, &e, load_item);
}

static void store_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct elements *e = context;
    uint64_t start = item * ELEMENTS_PER_ITEM, end = least(start + ELEMENTS_PER_ITEM, e->count);
    const float *from = e->from;
    if (e->host == DEVICE_HOST_F32) {
        memcpy((float *)e->to + start, from + start, (end - start) * sizeof(float));
        return;
    }
    uint16_t *to = e->to;
    for (uint64_t i = start; i < end; i += LANES) {
        uint32_t bits[LANES];
        v8 rounded = v8_bf16(v8_load(from + i, end - i));
        _mm256_storeu_si256((__m256i *)(void *)bits, _mm256_castps_si256(rounded));
        for (uint64_t j = 0; j < least(LANES, end - i); j++)
            to[i + j] = (uint16_t)(bits[j] >> 16);
    }
}

void cpu_store(struct device *device, void *to_host, enum device_host_dtype to,
               const compute_t *from, uint64_t elements)
{
    struct elements e = {
        .count = elements, .host = to, .to = to_host, .from = cpu_const_floats(from)};
    run_elements(device, &e, store_item);
}

static void zero_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct elements *e = context;
    uint64_t start = item * ELEMENTS_PER_ITEM * sizeof(float);
    uint64_t bytes = least(ELEMENTS_PER_ITEM * sizeof(float), e->count * sizeof(float) - start);
    memset((char *)e->to + start, 0, bytes);
}

void cpu_zero(struct device *device, void *memory, uint64_t bytes)
{
    struct elements e = {.count = bytes / sizeof(float), .to = memory};
    run_elements(device, &e, zero_item);
    memset((char *)memory + e.count * sizeof(float), 0, bytes % sizeof(float));
}

static void add_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct elements *e = context;
    uint64_t start = item * ELEMENTS_PER_ITEM, end = least(start + ELEMENTS_PER_ITEM, e->count);
    float *to = e->to;
    const float *from = e->from;
    for (uint64_t i = start; i < end; i += LANES)
        v8_store(to + i, end - i,
                 _mm256_add_ps(v8_load(to + i, end - i), v8_load(from + i, end - i)));
}

void cpu_add(struct device *device, float *to, const float *from, uint64_t elements)
{
    struct elements e = {.count = elements, .to = to, .from = from};
    run_elements(device, &e, add_item);
}

static void accumulate_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct elements *e = context;
    uint64_t start = item * ELEMENTS_PER_ITEM, end = least(start + ELEMENTS_PER_ITEM, e->count);
    float *to = e->to;
    const float *from = e->from;
    for (uint64_t i = start; i < end; i += LANES) {
        v8 sum = _mm256_add_ps(v8_load(to + i, end - i), v8_load(from + i, end - i));
        v8_store(to + i, end - i, v8_round(sum, e->rounding));
    }
}

void cpu_accumulate(struct device *device, compute_t *to, const compute_t *from, uint64_t elements)
{
    struct elements e = {.count = elements, .to = cpu_floats(to), .from = cpu_const_floats(from)};
    run_elements(device, &e, accumulate_item);
}

/* ---- embedding ---- */

struct embedding {
    const struct device_embedding *args;
    float *x, *dtable, *dposition_table;
    const float *table, *position_table, *dx;
    float scale;
    enum rounding rounding;
};

static struct embedding embedding_of(const struct device *device,
                                     const struct device_embedding *args)
{
    struct embedding e = {.args = args, .rounding = rounding_of(device)};
    e.scale = _mm256_cvtss_f32(v8_round(v8_set(args->scale), e.rounding));
    return e;
}

static void embedding_forward_row(const struct embedding *e, uint64_t row)
{
    uint64_t width = e->args->width;
    const float *from = e->table + (uint64_t)e->args->tokens[row] * width;
    const float *place = e->args->positions == NULL
                             ? NULL
                             : e->position_table + (uint64_t)e->args->positions[row] * width;
    float *x = e->x + row * width;
    if (place == NULL && e->args->scale == 0.0f) {
        memcpy(x, from, width * sizeof(float));
        return;
    }
    for (uint64_t i = 0; i < width; i += LANES) {
        uint64_t left = width - i;
        v8 value = v8_load(from + i, left);
        value = place == NULL ? _mm256_mul_ps(value, v8_set(e->scale))
                              : _mm256_add_ps(value, v8_load(place + i, left));
        v8_store(x + i, left, v8_round(value, e->rounding));
    }
}

static void embedding_forward_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct embedding *e = context;
    uint64_t end = least((item + 1) * ROWS_PER_ITEM, e->args->rows);
    for (uint64_t row = item * ROWS_PER_ITEM; row < end; row++)
        embedding_forward_row(e, row);
}

void cpu_embedding_forward(struct device *device, compute_t *x, const compute_t *table,
                           const compute_t *position_table, const struct device_embedding *args)
{
    CHECK(args->scale == 0.0f || args->positions == NULL);
    struct embedding e = embedding_of(device, args);
    e.x = cpu_floats(x);
    e.table = cpu_const_floats(table);
    if (args->positions != NULL)
        e.position_table = cpu_const_floats(position_table);
    threads_run(cpu_of(device)->threads, items_of(args->rows, ROWS_PER_ITEM),
                embedding_forward_item, &e);
}

/* to [start, end) += from, each rounded after its scale */
static void add_columns(const struct embedding *e, float *to, const float *from, uint64_t start,
                        uint64_t end)
{
    for (uint64_t i = start; i < end; i += LANES) {
        v8 value = v8_load(from + i, end - i);
        if (e->args->scale != 0.0f)
            value = v8_round(_mm256_mul_ps(value, v8_set(e->scale)), e->rounding);
        v8_store(to + i, end - i, _mm256_add_ps(v8_load(to + i, end - i), value));
    }
}

/* An item owns some columns of the whole tables, and walks the tokens in order. */
static void embedding_backward_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct embedding *e = context;
    const struct device_embedding *args = e->args;
    uint64_t width = args->width;
    uint64_t start = item * COLUMNS_PER_ITEM, end = least(start + COLUMNS_PER_ITEM, width);
    for (uint64_t row = 0; row < args->rows; row++) {
        const float *from = e->dx + row * width;
        if (args->tokens[row] != args->skipped_token)
            add_columns(e, e->dtable + (uint64_t)args->tokens[row] * width, from, start, end);
        if (args->positions != NULL)
            add_columns(e, e->dposition_table + (uint64_t)args->positions[row] * width, from, start,
                        end);
    }
}

void cpu_embedding_backward(struct device *device, float *dtable, float *dposition_table,
                            const compute_t *dx, const struct device_embedding *args)
{
    struct embedding e = embedding_of(device, args);
    e.dtable = dtable;
    e.dposition_table = dposition_table;
    e.dx = cpu_const_floats(dx);
    threads_run(cpu_of(device)->threads, items_of(args->width, COLUMNS_PER_ITEM),
                embedding_backward_item, &e);
}

/* ---- rope ---- */

struct rope {
    float *x;
    struct device_rope args;
    uint64_t half; /* of the part that turns */
    float sign;    /* of the sine */
    enum rounding rounding;
};

/* (a, b) -> (a cos - b sin, b cos + a sin), products rounded, then sums, as transformers */
static void rope_head(float *x, uint64_t half, const float *cosine, const float *sine,
                      const struct rope *r)
{
    v8 sign = v8_set(r->sign);
    for (uint64_t i = 0; i < half; i += LANES) {
        uint64_t left = half - i;
        v8 c = v8_load(cosine + i, left), s = _mm256_mul_ps(sign, v8_load(sine + i, left));
        v8 a = v8_load(x + i, left), b = v8_load(x + half + i, left);
        v8 ac = v8_round(_mm256_mul_ps(a, c), r->rounding);
        v8 as = v8_round(_mm256_mul_ps(a, s), r->rounding);
        v8 bc = v8_round(_mm256_mul_ps(b, c), r->rounding);
        v8 bs = v8_round(_mm256_mul_ps(b, s), r->rounding);
        v8_store(x + i, left, v8_round(_mm256_sub_ps(ac, bs), r->rounding));
        v8_store(x + half + i, left, v8_round(_mm256_add_ps(bc, as), r->rounding));
    }
}

static void rope_item(void *context, uint64_t item, uint32_t thread)
{
    (void)thread;
    const struct rope *r = context;
    uint64_t half = r->half;
    uint64_t end = least((item + 1) * ROWS_PER_ITEM, r->args.rows);
    for (uint64_t row = item * ROWS_PER_ITEM; row < end; row++) {
        uint64_t angle = (uint64_t)r->args.position[row] * half;
        for (uint64_t head = 0; head < r->args.heads; head++)
            rope_head(r->x + (row * r->args.heads + head) * r->args.head_dim, half,
                      r->args.cosine + angle, r->args.sine + angle, r);
    }
}

void cpu_rope(struct device *device, compute_t *x, struct device_rope args,
              enum device_direction direction)
{
    CHECK(args.rotated % 2 == 0 && args.rotated <= args.head_dim);
    struct rope r = {cpu_floats(x), args, (args.rotated == 0 ? args.head_dim : args.rotated) / 2,
                     direction == DEVICE_FORWARD ? 1.0f : -1.0f, rounding_of(device)};
    threads_run(cpu_of(device)->threads, items_of(args.rows, ROWS_PER_ITEM), rope_item, &r);
}
