/*
 * What io_worker holds, shared by its kinds of work:
 *
 *     start.c    data, store, import or recovery, first weights: everything before READY
 *     pager.c    the steady state: microbatches, weights, state, write-back, commit
 *     read_back.c the newest commit read back where no update reads it in time
 *     takeover.c  what is kept when a worker dies: by this process, or from a dead predecessor
 *     exporter.c a Hugging Face folder out of one pinned version, a page at a time between other
 * work offline.c  digest and export commands
 *
 * Pages move in this circle; io writes only the frames of MICROBATCH, WEIGHTS and STATE:
 *
 *     slot --read--> STATE frame --lent--> opt: AdamW --> OUT frame --write--> slot (another one)
 *                                                          |
 *                                                          +--copy--> WEIGHTS frame --lent--> gpu
 */
#ifndef IO_WORKER_IO_H
#define IO_WORKER_IO_H

#include "io_worker/commit.h"
#include "io_worker/data.h"
#include "io_worker/export.h"
#include "io_worker/page_tables.h"
#include "io_worker/slots.h"
#include "io_worker/store.h"
#include "ipc/worker.h"
#include "model/visits.h"

struct io;

/* One STATE or OUT frame and the transfer that uses it. */
struct frame_io {
    struct io_request request;
    struct io *io;
    uint64_t page;
    uint32_t lane, frame;
    int ready;         /* STATE: read and its header verified */
    int reads;         /* STATE: times this page was read into this frame */
    int after_commit;  /* STATE: submitted after the flush of the newest commit, which names it */
    uint32_t lent_out; /* STATE: the OUT frame lent with it */
};

/* The traffic with one opt_worker. Ranks count its own pages in forward order. */
struct lane {
    struct ring state, state_return, writeback;
    uint64_t own_pages;
    uint64_t frames_max; /* STATE frames; as many OUT frames */
    struct frame_io *in, *out;
    uint32_t *free_in, *free_out; /* stacks */
    uint64_t n_free_in, n_free_out;
    uint32_t *in_of_rank; /* [rank % frames_max]: the STATE frame that holds it */
    uint64_t read_rank;   /* next to read from the store */
    uint64_t lend_rank;   /* next to lend */
    uint32_t *again;      /* STATE frames that are being read a second time */
    uint64_t n_again;
    double read_s, apply_s; /* moving averages for prediction; seconds a page */
    uint64_t last_writeback_ns;
};

/* A walk over visits: which page is lent next. */
struct cursor {
    uint64_t number; /* step, or sweep */
    uint64_t visit, k;
};

struct exporter {
    struct export *export;
    struct page_entry *pinned; /* (n_pages): the version being exported */
    void *image;               /* a page image */
    struct io_request request;
    uint64_t step, page;
    int reading, landed;
    int reads; /* of this page, without success */
};

struct read_back {
    void *image; /* a page image; NULL where nothing is ever read back */
    struct io_request request;
    uint64_t page;
    int reading, landed;
    int reads; /* of this page, without success */
};

struct io {
    struct worker *w;
    const struct plan *plan;
    const struct model_layout *layout;
    enum dtype_mode dtype;

    struct data *data;
    struct store *store;
    struct engine *engine;
    unsigned engine_depth;
    struct commit *commit;
    struct commit_record newest; /* the newest durable commit */
    const char **directories;
    struct engine_region regions[2 * OPT_WORKERS_MAX + 2];

    struct page_tables tables; /* PAGE_TABLE */
    struct readback readback;
    uint64_t *readback_bits;

    /* MICROBATCH */
    struct ring microbatch, microbatch_return;
    uint32_t *free_microbatches;
    uint64_t n_free_microbatches;
    struct cursor train_feed;    /* number = step, k = microbatch */
    struct cursor evaluate_feed; /* number = evaluations served, k = microbatch */

    /* WEIGHTS: frame p holds page p */
    struct ring weights, weights_return;
    struct visits visits, forward_visits;
    struct cursor step_cursor, sweep_cursor;
    uint64_t *weights_version; /* (n_pages): version in the frame */
    uint64_t *weights_hash;    /* (n_pages): low word of its digest */
    uint32_t *weights_lent;    /* (n_pages): times lent now */
    uint64_t n_lent;           /* their sum; at most what WEIGHTS_RETURN holds */

    /* the step being applied */
    struct lane *lanes;
    uint64_t apply_step; /* whose decision has been taken in; complete_step + 1 or complete_step */
    struct step_orders orders;
    uint64_t pages_back;    /* written back by opt workers */
    uint64_t pages_written; /* and durable as far as the engine knows */
    uint64_t base_version;  /* version of the pages that step apply_step + 1 computes with */
    int reads_may_begin;    /* the complete version may be read for the next apply */

    struct exporter exporter;
    struct read_back read_back;
    uint64_t oldest_told_ns; /* when oldest_io was last looked at */
    int failed;              /* a completion callback met an error, which is set */
};

/* Until told to leave, or an error; or, in the modes without training, until done. */
int io_run(struct worker *w);
/* `io` is a struct io with an engine: what it waits for goes into the control page. */
void io_tell_oldest_request(void *io);

/* start.c */
int start_open(struct io *io);
void start_close(struct io *io);
int start_data(struct io *io);
int start_store(struct io *io, int *exists);
int start_weights(struct io *io);
/* `validate`: data is open; checks the weights' folder against the layout. Writes nothing. */
int start_validate(struct io *io);
int io_progress(void *context, enum store_activity activity, uint64_t done, uint64_t total);

/* pager.c */
int pager_open(struct io *io);
void pager_close(struct io *io);
/* One turn: how much was done, or negative. */
int pager_turn(struct io *io);
/* A page's image layout and, in a frame of WEIGHTS, its bytes. */
uint64_t pager_weights_bytes(const struct io *io, uint64_t page);

/* `page` of the newest commit was read since its flush, and every byte compared. */
void pager_mark_read_back(struct io *io, uint64_t page);

/* A generation begins: everything is where the newest complete step left it, nothing is lent. */
int pager_begin(struct io *io);
/* What the launcher goes on from, told in the control page. */
void pager_announce_resume(struct io *io);

/* takeover.c */
/* 1: this process takes the place of one that died, and shared memory holds what it left. */
int takeover_due(const struct io *io);
/* Page tables and WEIGHTS frames of a dead predecessor: 0, or ERROR_DAMAGED. */
int takeover_adopt(struct io *io);
/* Another worker died: waits for all transfers. 0, or negative. */
int takeover_stop(struct io *io);
/* All others have stopped, too: forgets the step being applied, reads back into WEIGHTS what it had
 * already replaced. 0, or negative. */
int takeover_keep(struct io *io);
/* Compute weights of the complete version into the page's frame, verified. */
int takeover_load(struct io *io, uint64_t page);

/* read_back.c */
int read_back_open(struct io *io);
void read_back_close(struct io *io);
/* 1: the newest commit must be read back explicitly before what comes next. */
int read_back_needed(const struct io *io);
/* One turn: 1 something was done, 0 nothing to do now, negative. */
int read_back_turn(struct io *io);

/* exporter.c */
int exporter_open(struct io *io);
void exporter_close(struct io *io);
/* The store exists: a word to the user at READY if no export would fit. */
void exporter_tell_space(struct io *io);
/* Starts exporting the version of `step` into `out`: that of the newest commit, or of the anchor.
 */
int exporter_begin(struct io *io, const char *out, uint64_t step);
/* While training: what could not be written is removed and told; 1. Else the error, unchanged. */
int exporter_give_up(struct io *io);
/* One turn: 1 something was done, 0 nothing to do now, negative. */
int exporter_turn(struct io *io);
static inline int exporter_busy(const struct io *io)
{
    return io->exporter.export != NULL;
}

/* offline.c */
int offline_digest(struct io *io);
int offline_export(struct io *io);

/* scrub.c: verifies the whole store; prints damage line by line, the summary goes into `message`.
 */
int scrub_run(struct io *io);

#endif
