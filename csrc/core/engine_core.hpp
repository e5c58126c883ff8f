/// EngineCore: the door of the core. Checks what comes in, holds the lock, and calls scheduler, builders and
/// commit.
///
/// Every method may be called from any thread. There is no state outside of the object.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "batch_inputs.hpp"
#include "commit.hpp"
#include "core_state.hpp"
#include "scheduled_budget.hpp"
#include "scheduler.hpp"

namespace deepinfer {

/// Numbers of the queues and pools at one moment.
struct CoreCounts {
    int32_t num_running = 0;
    int32_t num_waiting = 0;
    int32_t num_free_blocks = 0;
    int32_t num_free_slots = 0;
    int32_t num_in_flight = 0;
    int64_t num_preemptions = 0;
};

/// A computed sequence that has been given room.
struct AdmittedSequence {
    int64_t id = 0;
    std::vector<int32_t> blocks;
    int32_t slot = 0;
};

/// What the prefix cache knows of a sequence, in tokens.
struct KnownPrefix {
    int32_t num_tokens = 0;    ///< the border to resume from
    int32_t num_known = 0;     ///< in known blocks
    int32_t replay_start = 0;  ///< first position of its decoder windows
};

class EngineCore {
public:
    explicit EngineCore(const CoreConfig& config);

    const CoreConfig& config() const { return state_.config; }

    /// Vocabulary compression of n-gram windows; `pad_id` is a compressed id. Call before the first `add`.
    void set_compressed_vocab(std::vector<int32_t> map, int32_t pad_id);

    int64_t add(SequenceParams params, std::span<const int32_t> prompt);
    /// Queues a sequence that another engine has begun: it needs no prefill, but room and its bytes.
    int64_t add_computed(SequenceParams params, ComputedSequence computed);
    /// Gives blocks and slots to such sequences; they run from the next plan on. Whoever calls fills both
    /// in front of that plan, behind the step in flight: blocks [n] in the order of positions.
    std::vector<AdmittedSequence> admit_computed();

    // Preempted sequences in host memory.
    /// Sequences to be copied there, by whoever calls, before anything else takes blocks or is launched; and
    /// those whose copies nobody needs any more.
    std::pair<std::vector<SwapOut>, std::vector<int64_t>> take_swaps();
    /// As `admit_computed`, for sequences that were swapped out.
    std::vector<AdmittedSequence> admit_swapped();
    /// Of the swapped sequences only these have whole copies; the others are recomputed. Returns those that
    /// still are swapped.
    std::vector<int64_t> keep_swaps(std::span<const int64_t> ids);
    void set_copy_rate(double bytes_per_second);
    void add_prefill_time(const StepPlan& plan, double ms);
    SwapStats swap_stats();
    int64_t num_recomputed_rows();

    bool abort(int64_t id);
    /// Ends a sequence with its first `num_output_tokens` outputs, or corrects one that has just ended.
    void stop(int64_t id, int32_t num_output_tokens, FinishReason reason);
    bool fail(int64_t id, ErrorKind kind);
    void release(int64_t id);
    bool preempt(int64_t id);

    bool wants_prefill();
    std::shared_ptr<StepPlan> schedule(std::optional<StepKind> kind);
    /// Ids and reasons of the sequences that scheduling itself has ended since the last call.
    std::pair<std::vector<int64_t>, std::vector<uint8_t>> take_ended();
    CommitResult commit(const StepPlan& plan, const StepOutcome& outcome);
    /// Forgets all plans in flight; their sequences are recomputed. Returns the number of plans.
    int32_t discard_in_flight();

    Layout batch_layout(const StepPlan& plan);
    Layout sampling_layout(StepPlan& plan);
    void fill_batch(const StepPlan& plan, std::span<std::byte> buffer);
    void fill_sampling(StepPlan& plan, std::span<std::byte> buffer);

    /// The device has dealt the rows of a decode plan anew: `seqlens_q` [S] with the planned sum, within each
    /// sequence's limit. Call before the plan's sampling inputs are laid out and before the next schedule.
    void set_seqlens_q(StepPlan& plan, std::span<const int32_t> seqlens_q);

    void set_step_times(std::span<const StepTimePoint> points, std::span<const UndraftedTime> undrafted);
    /// A decode step of `num_tokens` rows has taken `ms`, and emitted `num_emitted` tokens (-1: not counted).
    void add_step_time(int32_t num_seqs, int32_t num_tokens, double ms, bool is_drafted, int32_t num_emitted);
    /// Milliseconds that a step is believed to take; 0 while no curve is known.
    double step_ms(int32_t num_seqs, int32_t num_tokens);
    double undrafted_step_ms(int32_t num_seqs);
    DraftBudgetStats draft_budget_stats();
    DraftCalibration calibration();
    void reset_reliability();

    CoreCounts counts();
    /// Forgets every prefix; false, and nothing changes, while a sequence is unfinished or a step in flight.
    bool reset_prefix_cache();
    PrefixCacheStats prefix_cache_stats();

    // Exchange of prefixes with a store outside.
    void start_reporting_prefixes();
    std::vector<PublishedBorder> take_published_borders();
    /// Waiting sequences that could be admitted now and whose prefix nobody asked a store for; named once.
    std::vector<int64_t> take_arrivals();
    /// What the cache knows of a waiting sequence.
    KnownPrefix find_prefix(int64_t id);
    /// Holds blocks and a slot for the first `border` tokens of a waiting sequence; null when that cannot be.
    /// One reservation at a time: `publish_prefix` or `cancel_prefix` ends it.
    std::optional<PrefixReservation> reserve_prefix(int64_t id, int32_t border);
    /// What is reserved is known from now on; whoever fills it does so in front of the next step, and says
    /// how that has ended before that step is committed. Returns a number for `settle_prefix`; 0 when the
    /// sequence is gone, and the reservation with it.
    int64_t publish_prefix();
    /// A published prefix is filled; or it is not sound: then it is forgotten, and sequences that have read
    /// it start again. Unknown numbers are ignored: `discard_in_flight` settles all as unsound.
    void settle_prefix(int64_t publication, bool is_sound);
    void cancel_prefix();
    void check_integrity();
    std::vector<int32_t> free_blocks();
    std::vector<int32_t> free_slots();
    double attention_flops(int64_t begin, int64_t end) const {
        return state_.work.attention_flops(begin, end);
    }

    /// Runs `read(const Sequence&)` under the lock and returns its value.
    template <typename Reader>
    auto read(int64_t id, const Reader& reader) {
        const std::lock_guard lock(mutex_);
        return reader(std::as_const(state_.sequences.get(id)));
    }

private:
    void settle(int64_t publication, bool is_sound);
    void require_outstanding(const StepPlan& plan) const;
    std::vector<AdmittedSequence> admit_outside(bool is_swapped);
    int32_t num_known_ids() const;
    std::unique_ptr<DraftBudget> make_budget();

    std::mutex mutex_;
    CoreState state_;
    ScheduledDraftBudget* draft_budget_ = nullptr;  ///< the scheduler's; null while every draft is verified
    Scheduler scheduler_;
    CompressedVocab vocab_;
    std::optional<PrefixReservation> reservation_;
    int64_t reserved_for_ = 0;
};

}  // namespace deepinfer
