#include "model/split.h"

#include <string.h>

void split_master(const float *master, uint64_t n, uint16_t *hi, uint16_t *lo)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &master[i], sizeof bits);
        hi[i] = (uint16_t)((bits + 0x8000u) >> 16);
        lo[i] = (uint16_t)bits;
    }
}

void join_master(const uint16_t *hi, const uint16_t *lo, uint64_t n, float *master)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t upper = (uint32_t)hi[i] - (lo[i] >> 15);
        uint32_t bits = (upper << 16) | lo[i];
        memcpy(&master[i], &bits, sizeof bits);
    }
}
