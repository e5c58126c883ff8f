/// StepTime: how long a decode step takes for a number of sequences and of query tokens.
///
/// A curve of points measured at start-up, corrected by what steps really take. Rules of the look-up:
///
///   * Points with `num_seqs` > 0 lie on one row per number of sequences. Between two rows the time is linear
///     in the sequences, along a row linear in the tokens per sequence; below the first point it is constant,
///     above the last one it goes on with the last slope. A single row says nothing about the number of
///     sequences: then the time depends on the tokens alone.
///   * Points with `num_seqs` 0 are the sizes of captured graphs, for any number of sequences. Execution is
///     padded to the next size, so the time is that of the next size >= B; joining them would invent costs.
///   * Noise must not make more work cheaper: the running maximum is taken along and across the rows.
///
/// Correction: (measured - curve) / tokens of each step, the median per number of tokens, the median of
/// those: a time per token, which holds what the curve lacks of context length and sampling. What remains is
/// a constant per number of sequences. Neither is ever negative. Plain steps, of one token per sequence and
/// without proposing drafts, have a correction of their own, the median of measured - curve: on a machine
/// that is slower than when the curve was taken, what drafting adds would else be counted as what every step
/// takes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace deepinfer {

/// A measured decode step that proposes drafts at its end.
struct StepTimePoint {
    int32_t num_seqs = 0;
    int32_t num_tokens = 0;
    double ms = 0.0;
};

/// A measured decode step of one token per sequence that proposes no drafts.
struct UndraftedTime {
    int32_t num_seqs = 0;
    double ms = 0.0;
};

/// Median of the newest `kCapacity` values.
template <int32_t kCapacity>
class RunningMedian {
public:
    void add(double value);
    int32_t size() const { return size_; }
    double median() const { return median_; }

private:
    std::array<double, kCapacity> values_{};
    int32_t size_ = 0, next_ = 0;
    double median_ = 0.0;
};

class StepTime {
    /// Nondecreasing piecewise linear function, or a step function of sizes.
    struct Row {
        int32_t num_seqs = 0;
        std::vector<double> x;   // ascending: tokens, or tokens per sequence
        std::vector<double> ms;  // nondecreasing

        double linear(double at) const;
        double next_size(double at) const;
    };

public:
    /// Times for a fixed number of sequences.
    class Curve {
    public:
        double operator()(int32_t num_tokens) const {
            return base(num_tokens) + per_token_ * size_of(num_tokens) + constant_;
        }

    private:
        friend class StepTime;
        double base(int32_t num_tokens) const;
        double size_of(int32_t num_tokens) const;  ///< tokens that are executed, padding included

        const Row* low_ = nullptr;
        const Row* high_ = nullptr;
        double weight_ = 0.0;  ///< of `high_`; above 1 behind the last row
        double scale_ = 1.0;   ///< from tokens to the rows' x
        bool is_padded_ = false;
        double per_token_ = 0.0;
        double constant_ = 0.0;
    };

    /// Replaces the curve and forgets the corrections. Throws `std::invalid_argument` for points that no step
    /// can have, for two points at one place and for a mixture of rows and captured sizes.
    void set_points(std::span<const StepTimePoint> points, std::span<const UndraftedTime> undrafted);
    bool is_known() const { return !rows_.empty(); }
    /// Valid until the next `set_points` or `add`.
    Curve at(int32_t num_seqs) const;
    /// A step of one token per sequence that proposes no drafts.
    double undrafted_ms(int32_t num_seqs) const;
    /// The same as measured at start-up, without what was learnt since.
    double plain_curve_ms(int32_t num_seqs) const;
    /// Whether such steps were seen while running, or can never be.
    bool knows_plain_steps() const { return !has_undrafted() || any_plain_tail_.size() >= kMinTail; }
    /// Whether the curve knows such steps.
    bool has_undrafted() const { return !undrafted_.x.empty(); }
    /// Most tokens that a step should have: the largest captured size, or no limit.
    int32_t max_tokens() const;
    /// A step has taken `ms`. Nothing happens while no curve is known.
    void add(int32_t num_seqs, int32_t num_tokens, double ms, bool is_drafted);

    double constant_ms(int32_t num_seqs) const;

private:
    static constexpr int32_t kWindow = 5000;   ///< steps after which an unused group counts no more
    static constexpr int32_t kGroupSize = 63;  ///< newest residuals of a number of tokens
    static constexpr int32_t kMinGroup = 10;   ///< residuals before a group counts
    static constexpr int32_t kTailSize = 9;    ///< newest remainders of a number of sequences
    static constexpr int32_t kMinTail = 5;

    struct Group {
        RunningMedian<kGroupSize> residuals;
        int64_t last_step = 0;
    };

    double draft_ms(int32_t num_seqs) const;
    const RunningMedian<kTailSize>* plain_tail(int32_t num_seqs) const;
    void update_per_token();

    std::vector<Row> rows_;  // ascending num_seqs
    Row undrafted_;
    bool is_padded_ = false;
    bool is_single_ = false;  ///< x of the only row is tokens
    int64_t num_steps_ = 0;
    std::map<int32_t, Group> groups_;                    // by executed tokens
    std::map<int32_t, RunningMedian<kTailSize>> tails_;  // by sequences
    RunningMedian<kTailSize> any_tail_;                  // per sequence, of any number of sequences
    std::map<int32_t, RunningMedian<kTailSize>> plain_tails_;  // by binary order of the sequences
    RunningMedian<kTailSize> any_plain_tail_;
    double per_token_ms_ = 0.0;
};

}  // namespace deepinfer
