/*
 * The life of an opt_worker, step by step:
 *
 *     collect   each own page's gradient arrives once (any order); its sum of squares goes to NORM
 *     wait      for the launcher's decision: apply with {lr, scale}, or skip
 *     apply     own pages in forward order: image in -> AdamW -> OUT frame, sealed -> WRITEBACK
 *
 * It never changes an input frame. Frames go back through RETURN after their last access. When it
 * dies in the middle, what it wrote so far lies in OUT frames that nobody named in a commit.
 */
#ifndef OPT_WORKER_UPDATE_H
#define OPT_WORKER_UPDATE_H

#include "ipc/worker.h"

/* Until told to leave (-ERROR_STOPPED) or an error. */
int update_run(struct worker *w);

#endif
