/// Swap pool: which preempted sequences go to host memory instead of being recomputed, and how many bytes of
/// it they hold. The bytes themselves are somebody else's.
///
/// The rule of `PreemptionMode::kAuto`, for a sequence of n computed tokens whose first h a prefix hit would
/// bring back, and which takes B bytes:
///
///     swap when  2 * B / copy rate  <  work of prefilling tokens h .. n / prefill rate
///
/// Either rate is told by the caller (`set_copy_rate`, `add_prefill_time`); while one is unknown nothing is
/// swapped. `kSwap` always swaps. Without room in the pool a sequence is recomputed.
#pragma once

#include <cstdint>
#include <vector>

#include "config.hpp"
#include "sequence.hpp"

namespace deepinfer {

/// Totals since the start, but for what is held.
struct SwapStats {
    int64_t num_out = 0;      ///< sequences that went to the host
    int64_t num_in = 0;       ///< and came back
    int64_t num_refused = 0;  ///< recomputed because the pool was full
    int32_t num_held = 0;     ///< there now
    int64_t held_bytes = 0;
};

/// A sequence whose bytes are to be copied before its blocks and its slot are written by anybody else.
struct SwapOut {
    int64_t id = 0;
    std::vector<int32_t> blocks;  // [n] of its computed tokens
    int32_t slot = 0;
    int32_t num_scores = 0;  ///< drafts whose scores are part of its state
};

class SwapPool {
public:
    explicit SwapPool(const CoreConfig& config);

    /// Whether a running sequence that is preempted may be worth its bytes at all.
    bool is_enabled() const { return mode_ != PreemptionMode::kRecompute && limit_bytes_ > 0; }
    /// Bytes of a sequence with so many blocks and drafts tested by ratio.
    int64_t bytes_of(int64_t num_blocks, int64_t num_scores) const;
    /// Whether to swap rather than to recompute for `flops`; counts a refusal for lack of room.
    bool accepts(int64_t bytes, double flops);
    void add(int64_t bytes);
    /// They are not there any more; `is_back`: in the caches again.
    void remove(int64_t bytes, bool is_back);

    void set_copy_rate(double bytes_per_second) { copy_rate_ = bytes_per_second; }
    /// A prefill step of so much work has taken so long. The rate is the mean over all of them.
    void add_prefill_time(double flops, double ms);

    SwapStats stats() const { return stats_; }
    int64_t limit_bytes() const { return limit_bytes_; }

private:
    const PreemptionMode mode_;
    const int64_t limit_bytes_, block_bytes_, slot_bytes_, score_bytes_;
    double copy_rate_ = 0.0;  ///< bytes per second; 0: unknown
    double prefill_flops_ = 0.0, prefill_seconds_ = 0.0;
    SwapStats stats_;
};

}  // namespace deepinfer
