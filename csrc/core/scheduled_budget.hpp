/// ScheduledDraftBudget: verifies the drafts that are worth their time.
///
/// With a_rj the probability that drafts 1 .. j of sequence r all stand, T the time of a step and B its query
/// tokens, it maximises the tokens per time
///
///     (R + sum of the chosen a_rj) / T(R, B),   B = R + number of the chosen
///
/// All survivals are sorted, descending, ties by lower sequence index, then lower position; the best prefix
/// of the whole list wins, the shortest among equals. Survivals do not increase with the position, so a
/// prefix of the list is a prefix of each block, and for each B it has the largest sum: no choice is better,
/// on any curve. The walk never stops early: with steps in the curve a later prefix may win.
///
/// Which estimates decide:
///   * fresh confidences for coupled verification, whose output no choice can change;
///   * for ratio verification those of the block before, as far as they read no token that may be drawn
///   again:
///     the choice must not depend on the drafts it is about (else their law is no longer exact);
///   * the block before for every sequence in flight, whose drafts do not exist yet;
///   * where nothing is known, of a new sequence or of a position, the share of the drafts there that stood
///     so far; certain in the beginning, so that there are outcomes.
///
/// It verifies everything where no curve is known, and where choosing would gain less than `min_gain` over
/// that. Where plain decoding is faster for long, or by much, no drafts are proposed at all but for a probe
/// now and then, the rarer the more of them were in vain; the newest estimates keep being weighed, so a change
/// of load is answered at once. Drafts that are still at hand then are verified where that pays in a step
/// that proposes none. While drafts pay, a few plain steps now and then show what these really take, and what
/// steps with drafts really bring, in tokens per time, discounts what the model of them promises.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "config.hpp"
#include "draft_budget.hpp"
#include "draft_calibration.hpp"
#include "step_time.hpp"

namespace deepinfer {

/// What the budget has decided so far; steps without sequences do not count.
struct DraftBudgetStats {
    int64_t num_steps = 0;
    int64_t num_full = 0;       ///< every draft at hand was verified (and there were some)
    int64_t num_cut = 0;        ///< some of the drafts at hand
    int64_t num_none = 0;       ///< none of the drafts at hand
    int64_t num_undrafted = 0;  ///< steps that were told to propose no drafts
    int64_t num_probes = 0;     ///< steps that proposed drafts only to look
    double price = 0.0;         ///< survival that the next draft of the newest step would have needed
};

class ScheduledDraftBudget : public DraftBudget {
public:
    /// `step_time` and `calibration` are read at every choice and outlive the budget.
    ScheduledDraftBudget(const CoreConfig& config, const StepTime& step_time,
                         const DraftCalibration& calibration);

    void choose(std::span<const DraftCandidate> candidates, std::span<int32_t> num_drafts) override;
    bool wants_drafts() const override { return num_plain_ == 0 && (!is_paused_ || is_probe_); }
    const DraftBudgetStats& stats() const { return stats_; }
    /// A step that verified drafts and proposed new ones has emitted tokens.
    void observe(int32_t num_seqs, int32_t num_emitted, double ms);
    /// Forgets what was observed.
    void forget_observations() { rates_ = {}; }

private:
    static constexpr int32_t kMaxLosing = 200;  ///< steps in a row that plain decoding is no slower
    static constexpr double kMaxLoss = 2.0;     ///< time that they cost more than plain ones, in steps
    static constexpr double kResumeGain = 0.1;  ///< share by which drafts must win before they come back
    static constexpr int32_t kProbeInterval = 64;  ///< steps until the first probe
    static constexpr int32_t kMaxProbeInterval = 2048;
    static constexpr int32_t kPlainInterval = 16;  ///< steps with drafts until the first plain ones
    static constexpr int32_t kNumPlain = 6;

    struct Choice {
        size_t num_items = 0;  ///< entries of the sorted list that are taken
        double tokens_per_ms = 0.0;
    };

    /// Tokens per time that steps with drafts promised and brought, each a sum that fades.
    struct Rates {
        static constexpr double kFade = 15.0 / 16.0;
        static constexpr int32_t kMinSteps = 8;
        double promised_tokens = 0.0, promised_ms = 0.0, tokens = 0.0, ms = 0.0;
        int32_t num_steps = 0;

        double share_kept() const;  ///< in 0.25 .. 1; 1 while little is known
    };

    Rates& rates_of(int32_t num_seqs) { return rates_[std::bit_width(static_cast<uint32_t>(num_seqs))]; }
    void list_survivals(std::span<const DraftCandidate> candidates, bool is_potential);
    std::pair<Choice, Choice> walk(int32_t num_seqs, const StepTime::Curve& curve, double shift) const;
    void judge(double tokens_per_ms, double plain_per_ms);
    void look_at_plain_steps();
    void count(bool has_drafts, size_t taken, bool takes_all);

    int32_t max_tokens_;
    double min_gain_;
    const StepTime& step_time_;
    const DraftCalibration& calibration_;

    /// A draft of the step: survival, and the place in (sequence, position) order.
    struct Item {
        float survival;
        int32_t place;
        bool operator<(const Item& other) const {
            return survival > other.survival || (survival == other.survival && place < other.place);
        }
    };
    std::vector<Item> items_;  // reused between steps
    bool is_paused_ = false;
    bool is_probe_ = false;
    int32_t num_losing_ = 0;
    double loss_ = 0.0;
    int32_t steps_since_drafts_ = 0;
    int32_t probe_interval_ = kProbeInterval;
    int32_t num_plain_ = 0;  ///< steps still to come that propose no drafts, to learn what they take
    int32_t steps_since_plain_ = 0;
    int32_t plain_interval_ = kPlainInterval;
    std::array<Rates, 33> rates_{};  ///< by the binary order of the number of sequences
    DraftBudgetStats stats_;
};

}  // namespace deepinfer
