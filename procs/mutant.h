/*
 * Mutants: each safety mechanism can be switched off, in the simulator only (tests/sim), to show
 * that a test notices. In the product mutant() is a constant 0 and the compiler drops what it
 * guards.
 *
 *     if (!mutant(MUTANT_no_fence))
 *         rc = file_lock(store, &file);
 */
#ifndef PROCS_MUTANT_H
#define PROCS_MUTANT_H

#define MUTANTS(X)                                                                                 \
    X(no_flush, "slots are not flushed before the table is written")                               \
    X(flush_one_directory, "only the first directory's slots are flushed")                         \
    X(flush_error_ignored, "a flush that fails counts as done")                                    \
    X(failed_flush_taken_over,                                                                     \
      "the successor of an io_worker whose flush failed goes on with its step")                    \
    X(table_in_place, "every table goes to the same place")                                        \
    X(one_record, "every record goes to the same place")                                           \
    X(commit_before_writes, "a step is complete when its slot writes are submitted")               \
    X(no_read_back_of_commit, "table and record are not compared with what the disk has")          \
    X(no_table_digest, "recovery believes a table without its digests")                            \
    X(no_slot_check, "recovery believes slots without reading them")                               \
    X(no_flush_at_recovery, "recovery believes what is not flushed")                               \
    X(no_second_read, "recovery takes one failed read of table or ring for damage")                \
    X(slots_not_anchored, "a slot may be reused before the newest commit is read back")            \
    X(anchored_by_one_page, "one page read back proves the whole commit")                          \
    X(skip_without_read_back,                                                                      \
      "a skipped step is committed before the newest commit was read back")                        \
    X(slot_from_step, "the slot follows from the step's parity")                                   \
    X(no_fence, "the store's files are not locked")                                                \
    X(no_run_lock, "the run directory is not locked")                                              \
    X(no_descriptor_check, "a descriptor is believed without its check")                           \
    X(no_generation_check, "a descriptor of an earlier generation is believed")                    \
    X(no_ring_reset, "ring cursors stay where the dead generation left them")                      \
    X(no_wait_for_transfers, "a restart begins while the survivor's transfers are in flight")      \
    X(no_wait_for_stop, "a restart does not wait until every survivor has stopped")                \
    X(stale_weights, "weights that the abandoned step had replaced are not read again")            \
    X(frames_not_hashed, "a successor believes the WEIGHTS frames that it finds")                  \
    X(page_table_believed, "a successor believes the page table that it finds")                    \
    X(apply_before_commit, "a step is applied while the one before is being committed")            \
    X(weights_before_update, "WEIGHTS lends a page before it holds the version of the step")       \
    X(return_before_copy, "a microbatch frame is given back before the copy from it ends")         \
    X(publish_before_copy, "a gradient is published before it has left the device")                \
    X(line_after_record, "a step's line is not durable when its commit is asked for")              \
    X(metrics_name_not_durable, "the name of metrics.jsonl is not flushed")                        \
    X(short_write_done, "a short transfer counts as done")                                         \
    X(frame_given_back_twice, "a gradient frame is given back twice")                              \
    X(given_up_comes_back, "a commit that was given up is not committed over")                     \
    X(half_applied_step_kept, "a restart keeps the step that was being applied")                   \
    X(stop_from_anybody, "a request to stop is obeyed whoever sends it")                           \
    X(facts_of_the_dead, "the launcher believes what a dead io_worker told last")                  \
    X(beside_the_unkillable, "a worker is started beside one that cannot be killed")               \
    X(spike_applied_at_once, "a spike's step is applied without computing it again")

#define X(name, sentence) MUTANT_##name,
enum mutant { MUTANT_none, MUTANTS(X) MUTANT_COUNT };
#undef X

#ifdef MTLAUNCH_SIM
extern enum mutant mutant_now;
#endif
#if defined MTLAUNCH_SIM &&                                                                        \
    !defined MTLAUNCH_COVERAGE /* where branches are counted, the product's */
#define mutant(which) (mutant_now == (which))
#else
#define mutant(which) 0
#endif

#endif
