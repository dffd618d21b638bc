#include "opt_worker/isa.h"

#include "procs/check.h"
#include "procs/error.h"

#include <immintrin.h>
#include <stdatomic.h>

static const char *const names[] = {
#define X(id, name) [id] = name,
    ISAS(X)
#undef X
};
_Static_assert(sizeof names / sizeof names[0] == ISA_COUNT, "every instruction set has a name");

/* All exceptions masked, round to nearest, FTZ, DAZ, no sticky flags (Intel SDM vol. 1, 10.2.3). */
enum { MXCSR_MODE = 0x1f80 | 0x8000 | 0x0040 };

/* ISA_COUNT until first asked. Two threads that ask at once store the same value. */
static _Atomic int isa_chosen = ISA_COUNT;

int isa_check(void)
{
    if (isa_supported(ISA_SCALAR) && isa_supported(ISA_AVX2))
        return 0;
    error_set(ERROR_FIT,
              "opt_worker: this CPU does not run the optimizer: expected x86-64-v3 (AVX2 and FMA), "
              "found AVX2 %s, FMA %s",
              __builtin_cpu_supports("avx2") ? "yes" : "no",
              __builtin_cpu_supports("fma") ? "yes" : "no");
    return error_hint(
        "use a CPU of 2013 or later; in a virtual machine, pass the host's CPU model on");
}

int isa_supported(enum isa isa)
{
    switch (isa) {
    case ISA_SCALAR:
        return __builtin_cpu_supports("fma") != 0;
    case ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma");
    case ISA_COUNT:
        break;
    }
    return 0;
}

enum isa isa_now(void)
{
    int isa = atomic_load_explicit(&isa_chosen, memory_order_relaxed);
    if (isa != ISA_COUNT)
        return (enum isa)isa;
    isa = ISA_AVX512;
    while (isa > ISA_SCALAR && !isa_supported((enum isa)isa))
        isa--;
    CHECK(isa_supported((enum isa)isa));
    atomic_store_explicit(&isa_chosen, isa, memory_order_relaxed);
    return (enum isa)isa;
}

void isa_use(enum isa isa)
{
    CHECK(isa_supported(isa));
    atomic_store_explicit(&isa_chosen, (int)isa, memory_order_relaxed);
}

const char *isa_name(enum isa isa)
{
    CHECK(isa < ISA_COUNT);
    return names[isa];
}

unsigned isa_mode_enter(void)
{
    unsigned saved = _mm_getcsr();
    _mm_setcsr(MXCSR_MODE);
    return saved;
}

void isa_mode_leave(unsigned saved)
{
    _mm_setcsr(saved);
}
