/*
 * The CPU device from inside: its state, and the operations that fill the table in device_cpu.c.
 * Each .c file of the folder holds one family of operations; their contracts are in device.h.
 *
 * Work items are fixed numbers of rows or elements (constants in the files), so that reductions and
 * tiles are the same for every thread count.
 */
#ifndef GPU_WORKER_DEVICE_CPU_CPU_H
#define GPU_WORKER_DEVICE_CPU_CPU_H

#include "gpu_worker/device.h"
#include "gpu_worker/device_cpu/gemm.h"
#include "gpu_worker/device_cpu/threads.h"

struct cpu_device {
    struct device base; /* first: the device is the cpu_device */
    struct threads *threads;
    float *scratch; /* (threads, CPU_SCRATCH_FLOATS) f32: score tiles of attention */
    char lineage[512];
};

/* per thread: two score tiles */
enum { CPU_SCRATCH_FLOATS = 2 * 128 * 256 + 48 };

static inline struct cpu_device *cpu_of(struct device *device)
{
    return (struct cpu_device *)device;
}

/* Compute arrays are f32 arrays on this device. */
static inline float *cpu_floats(compute_t *p)
{
    return (float *)(void *)p;
}

static inline const float *cpu_const_floats(const compute_t *p)
{
    return (const float *)(const void *)p;
}

/* elements.c */
void cpu_load(struct device *, compute_t *, const void *, enum device_host_dtype, uint64_t);
void cpu_store(struct device *, void *, enum device_host_dtype, const compute_t *, uint64_t);
void cpu_add(struct device *, float *, const float *, uint64_t);
void cpu_zero(struct device *, void *, uint64_t bytes);
void cpu_accumulate(struct device *, compute_t *, const compute_t *, uint64_t);
void cpu_embedding_forward(struct device *, compute_t *, const compute_t *, const compute_t *,
                           const struct device_embedding *);
void cpu_embedding_backward(struct device *, float *, float *, const compute_t *,
                            const struct device_embedding *);
void cpu_rope(struct device *, compute_t *, struct device_rope, enum device_direction);

/* norm.c */
void cpu_norm_forward(struct device *, const struct device_norm_forward *);
void cpu_norm_backward(struct device *, const struct device_norm_backward *);
void cpu_linear_backward_bias(struct device *, float *, const compute_t *, uint64_t rows,
                              uint64_t out);

/* activation.c */
void cpu_activation_forward(struct device *, const struct device_activation_forward *);
void cpu_activation_backward(struct device *, const struct device_activation_backward *);

/* linear.c */
void cpu_linear_forward(struct device *, compute_t *, const compute_t *, const compute_t *,
                        const compute_t *, struct device_linear);
void cpu_linear_backward_input(struct device *, compute_t *, enum device_write, const compute_t *,
                               const compute_t *, struct device_linear);
void cpu_linear_backward_weight(struct device *, const struct device_weight_gradient *, uint64_t n,
                                const compute_t *, uint64_t rows, uint64_t in);
void cpu_head_forward(struct device *, float *, const compute_t *, const compute_t *,
                      struct device_linear);
void cpu_head_backward_input(struct device *, compute_t *, const float *, const compute_t *,
                             struct device_linear);
void cpu_head_backward_weight(struct device *, float *, const float *, const compute_t *,
                              struct device_linear);

/* attention.c, attention_backward.c, attention_decode.c */
void cpu_attention_forward(struct device *, compute_t *, float *, const compute_t *,
                           const compute_t *, const compute_t *, struct device_attention);
uint64_t cpu_attention_scratch_bytes(const struct device *, struct device_attention);
void cpu_attention_backward(struct device *, const struct device_attention_backward *,
                            struct device_attention);
void cpu_attention_decode(struct device *, const struct device_decode_arrays *,
                          struct device_decode);

/* experts.c */
void cpu_router_forward(struct device *, const struct device_router_forward *,
                        struct device_router);
void cpu_router_backward(struct device *, const struct device_router_backward *,
                         struct device_router);
void cpu_expert_gather(struct device *, compute_t *, const compute_t *, const int32_t *slots,
                       uint64_t n, struct device_router);
void cpu_expert_scatter(struct device *, compute_t *, const compute_t *, const float *weights,
                        const int32_t *slots, uint64_t n, struct device_router);
void cpu_expert_scatter_backward(struct device *, const struct device_expert_scatter_backward *,
                                 struct device_router);

/* cross_entropy.c */
void cpu_softcap(struct device *, float *, float cap, uint64_t);
void cpu_cross_entropy(struct device *, double *, float *, const int32_t *,
                       struct device_cross_entropy, enum device_loss);

#endif
