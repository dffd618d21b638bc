#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "gpu_worker/device_cpu/cpu.h"
#include "procs/check.h"
#include "procs/error.h"

enum { ALIGNMENT = 64, HUGE_PAGE = 2 << 20 };

static void *cpu_alloc(struct device *device, uint64_t bytes)
{
    (void)device;
    void *memory = NULL;
    uint64_t alignment = bytes < HUGE_PAGE ? ALIGNMENT : HUGE_PAGE;
    if (posix_memalign(&memory, alignment, bytes == 0 ? ALIGNMENT : bytes) != 0) {
        (void)error_set(ERROR_FIT, "the CPU device has no room for %llu bytes",
                        (unsigned long long)bytes);
        return NULL;
    }
    /* matrices are read with large strides: small pages would miss the TLB on every row. Only whole
     * huge pages, so that no memory is used beyond what was asked for. Refusal costs only speed. */
    if (bytes >= HUGE_PAGE)
        (void)madvise(memory, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    return memory;
}

static void cpu_free(struct device *device, void *memory)
{
    (void)device;
    free(memory);
}

static void cpu_copy(struct device *device, void *to, const void *from, uint64_t bytes)
{
    (void)device;
    memcpy(to, from, bytes);
}

static void cpu_synchronize(struct device *device)
{
    (void)device;
}

static const char *cpu_lineage(const struct device *device)
{
    return ((const struct cpu_device *)device)->lineage;
}

static void cpu_close(struct device *device)
{
    struct cpu_device *cpu = cpu_of(device);
    threads_close(cpu->threads);
    free(cpu->scratch);
    free(cpu);
}

static const struct device_ops cpu_ops = {
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .synchronize = cpu_synchronize,
    .load = cpu_load,
    .store = cpu_store,
    .add = cpu_add,
    .accumulate = cpu_accumulate,
    .embedding_forward = cpu_embedding_forward,
    .embedding_backward = cpu_embedding_backward,
    .norm_forward = cpu_norm_forward,
    .norm_backward = cpu_norm_backward,
    .linear_forward = cpu_linear_forward,
    .linear_backward_input = cpu_linear_backward_input,
    .linear_backward_weight = cpu_linear_backward_weight,
    .linear_backward_bias = cpu_linear_backward_bias,
    .rope = cpu_rope,
    .attention_forward = cpu_attention_forward,
    .attention_backward = cpu_attention_backward,
    .attention_scratch_bytes = cpu_attention_scratch_bytes,
    .attention_decode = cpu_attention_decode,
    .activation_forward = cpu_activation_forward,
    .activation_backward = cpu_activation_backward,
    .router_forward = cpu_router_forward,
    .router_backward = cpu_router_backward,
    .expert_gather = cpu_expert_gather,
    .expert_scatter = cpu_expert_scatter,
    .expert_scatter_backward = cpu_expert_scatter_backward,
    .head_forward = cpu_head_forward,
    .softcap = cpu_softcap,
    .cross_entropy = cpu_cross_entropy,
    .head_backward_input = cpu_head_backward_input,
    .head_backward_weight = cpu_head_backward_weight,
    .close = cpu_close,
    .lineage = cpu_lineage,
};

/* The files with SIMD code are compiled for AVX2 and FMA; this one is not, so that it can say so.
 */
static int require_isa(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 0;
    return error_set(ERROR_FAILED, "the CPU device: expected a CPU with AVX2 and FMA (x86-64-v3), "
                                   "found one without");
}

int device_cpu_open(struct device **device, enum device_dtype dtype, uint32_t n_threads)
{
    CHECK(n_threads >= 1);
    if (require_isa() < 0 || gemm_load() < 0)
        return error_wrap("device cpu");
    struct cpu_device *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL)
        return error_set(ERROR_FAILED, "device cpu: out of memory");
    cpu->base = (struct device){.ops = &cpu_ops, .dtype = dtype, .compute_bytes = sizeof(float)};
    if (posix_memalign((void **)&cpu->scratch, ALIGNMENT,
                       n_threads * CPU_SCRATCH_FLOATS * sizeof(float)) != 0) {
        free(cpu);
        return error_set(ERROR_FAILED, "device cpu: out of memory for %u threads", n_threads);
    }
    if (threads_open(&cpu->threads, n_threads) < 0) {
        cpu_close(&cpu->base);
        return error_wrap("device cpu");
    }
    snprintf(cpu->lineage, sizeof cpu->lineage, "cpu 1 %s %s norm rows %d",
             dtype == DEVICE_BF16 ? "bfloat16" : "float32", gemm_lineage(), DEVICE_NORM_ROWS);
    *device = &cpu->base;
    return 0;
}

void device_cpu_set_heartbeat(struct device *device, _Atomic uint64_t *heartbeat)
{
    threads_set_heartbeat(cpu_of(device)->threads, heartbeat);
}
