/// CoreState: the queues and pools that scheduling and commit share, with the few moves that keep them
/// consistent.
///
/// Every unfinished sequence is in exactly one of `waiting` (no resources, or a prompt prefilled in part) and
/// `running` (prompt scheduled to its end). A sequence whose step is in flight keeps blocks and slot until
/// that step is committed, whatever happens to it meanwhile; if it was ended or preempted it is also listed
/// in `leaving`.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "block_pool.hpp"
#include "config.hpp"
#include "draft_calibration.hpp"
#include "flops.hpp"
#include "prefix_cache.hpp"
#include "sequence.hpp"
#include "step_plan.hpp"
#include "step_time.hpp"
#include "swap_pool.hpp"

namespace deepinfer {

/// Monotonic seconds, the clock of Python's `time.monotonic()`.
double monotonic_seconds();

struct CoreState {
    explicit CoreState(const CoreConfig& config);
    CoreState(const CoreState&) = delete;
    CoreState& operator=(const CoreState&) = delete;

    CoreConfig config;
    WorkModel work;
    BlockPool blocks;
    BlockPool slots;
    PrefixCache prefix_cache;
    SwapPool swap;
    SequencePool sequences;
    StepTime step_time;
    DraftCalibration calibration;
    std::map<int64_t, Sequence*> waiting;  ///< by id: arrival order, also for preempted sequences
    std::vector<Sequence*> running;        ///< in the order of admission; null where one left since `compact`
    std::vector<Sequence*> partial;  ///< waiting sequences that hold blocks for the rest of their prompt
    std::vector<Sequence*> leaving;  ///< ended or preempted while in flight
    std::deque<std::shared_ptr<StepPlan>> in_flight;  ///< scheduled and not committed, oldest first
    std::vector<Sequence*> ended;  ///< ended by scheduling itself, not yet told to the caller
    /// Sequences admitted with computed bytes, and the plan behind their copies; until that is committed
    /// nobody can tell whether the bytes have arrived, also if the plan does without the sequence.
    std::vector<std::pair<int64_t, int64_t>> loading;
    std::vector<SwapOut> swap_outs;     ///< whose bytes nobody has copied yet
    std::vector<int64_t> swap_drops;    ///< whose copies nobody needs any more
    int64_t num_preemptions = 0;
    int64_t num_recomputed_rows = 0;  ///< rows of tokens that had been computed before
    int32_t decode_steps = 0;  ///< since the last prefill step
    int64_t next_step = 1;

    /// Sequences that hold a slot and are going to use it.
    int32_t num_admitted() const { return num_running() + static_cast<int32_t>(partial.size()); }
    int32_t num_running() const { return static_cast<int32_t>(running.size()) - num_holes_; }
    /// Blocks that come free when the steps in flight are committed.
    int32_t num_blocks_leaving() const;

    /// Takes a slot and, behind the blocks of `hit`, which `PrefixCache::take` has taken, those of the whole
    /// known length; the caller has checked that they exist.
    void admit(Sequence& sequence, PrefixHit&& hit);
    /// Admits a sequence whose tokens are those of `leader`, whose last chunk has just been scheduled: it
    /// shares the full blocks in front of the last token and gets the rest by copies behind that step.
    void admit_fork(Sequence& sequence, const Sequence& leader, StepPlan& plan);
    /// Admits a sequence whose bytes come from outside, straight into `running`.
    void admit_computed(Sequence& sequence);
    /// Appends free blocks to a table; the caller has checked that they exist.
    void allocate_blocks(int32_t count, std::vector<int32_t>& table);
    /// waiting -> running, when its prompt is scheduled to the end.
    void start_running(Sequence& sequence);
    /// Back to waiting, to be recomputed or swapped in; resources go back now, or at the commit when it is in
    /// flight. A running sequence whose bytes are worth it is listed in `swap_outs` when they do.
    /// With `stop_preempted_request` it ends instead.
    void preempt(Sequence& sequence);
    /// Ends an unfinished sequence.
    void finish(Sequence& sequence, FinishReason reason, ErrorKind kind, double now);
    /// One plan less in flight; the last one gives back what a leaving sequence holds.
    void leave_flight(Sequence& sequence);
    /// The copy of a swapped sequence is lost or was never made: it is recomputed.
    void forget_swap(Sequence& sequence);
    /// Back to waiting without a mark: its step never happened, caches may be half written.
    void restart(Sequence& sequence);
    /// The copies to a forked sequence never happened: `restart`, unless it has no use for them any more.
    void restart_fork(int64_t id);
    /// Nobody has the bytes of the sequences in `loading`: `restart`, and whoever was swapped out with them
    /// is recomputed.
    void restart_loading();
    /// A prefix from outside has turned out wrong: `restart` for whoever has read it, with all that has come
    /// from it in the steps in flight.
    void restart_readers(const PrefixReservation& prefix);
    /// Blocks and slot back to the pools.
    void drop_resources(Sequence& sequence);
    /// Gives back the blocks behind the first `num_tokens` tokens.
    void trim_blocks(Sequence& sequence, int32_t num_tokens);
    /// Closes the holes in `running`; whoever walks it has called this.
    void compact();

private:
    int32_t num_holes_ = 0;

    void detach(Sequence& sequence);         ///< Out of its queue.
    void drop_or_leave(Sequence& sequence);  ///< Drops its resources now, or at the commit.
    void swap_or_drop(Sequence& sequence);   ///< Nothing of it is in flight.
    bool swap_out(Sequence& sequence);
};

}  // namespace deepinfer
