#include "io_worker/slots.h"

#include "procs/check.h"
#include "procs/mutant.h"

#include <string.h>

static slot_mask bit(uint32_t slot)
{
    if (slot == SLOT_NONE)
        return 0;
    CHECK(slot < SLOTS_MAX);
    return (slot_mask)1 << slot;
}

slot_mask slots_protected(const struct slot_holders *holders)
{
    slot_mask mask = bit(holders->anchor) | bit(holders->committed) | bit(holders->committing) |
                     bit(holders->complete) | bit(holders->forming);
    for (uint32_t i = 0; i < holders->n_between; i++)
        mask |= bit(holders->between[i]);
    for (uint32_t i = 0; i < holders->n_pinned; i++)
        mask |= bit(holders->pinned[i]);
    return mask;
}

uint32_t slots_choose(const struct slot_holders *holders, uint32_t slots_per_page)
{
    CHECK(slots_per_page >= 2 && slots_per_page <= SLOTS_MAX);
    const slot_mask taken = slots_protected(holders);
    for (uint32_t slot = 0; slot < slots_per_page; slot++)
        if ((taken & bit(slot)) == 0)
            return slot;
    return SLOT_NONE;
}

void readback_begin(struct readback *readback, uint64_t sequence)
{
    memset(readback->bits, 0, readback_words(readback->n_pages) * sizeof readback->bits[0]);
    readback->n_seen = 0;
    readback->sequence = sequence;
    readback->active = 1;
}

int readback_mark(struct readback *readback, uint64_t sequence, uint64_t page)
{
    CHECK(page < readback->n_pages);
    if (!readback->active || sequence != readback->sequence)
        return 0;
    const uint64_t mask = (uint64_t)1 << (page % 64);
    if (readback->bits[page / 64] & mask)
        return 0;
    readback->bits[page / 64] |= mask;
    readback->n_seen++;
    if (readback->n_seen < readback->n_pages && !mutant(MUTANT_anchored_by_one_page))
        return 0;
    readback->active = 0;
    return 1;
}

uint64_t readback_next(const struct readback *readback, uint64_t from)
{
    for (uint64_t page = from; page < readback->n_pages; page++)
        if ((readback->bits[page / 64] >> (page % 64) & 1) == 0)
            return page;
    return readback->n_pages;
}
