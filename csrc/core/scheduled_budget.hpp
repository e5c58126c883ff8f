/// ScheduledDraftBudget: verifies the drafts that are worth their time.
///
/// With a_rj the probability that drafts 1 .. j of sequence r all stand, w_r what a token of it is worth
/// (progress_weights.hpp; 1 while others wait, 1 in the mean), T the time of a step and B its query tokens,
/// it maximises the worth per time
///
///     (R + sum of the chosen w_r a_rj) / T(R, B),   B = R + number of the chosen
///
/// All gains w_r a_rj are sorted, descending, ties by lower sequence index, then lower position; the best
/// prefix of the whole list wins, the shortest among equals. Gains do not increase with the position, so a
/// prefix of the list is a prefix of each block, and for each B it has the largest sum: no choice is better,
/// on any curve. The walk never stops early: with steps in the curve a later prefix may win.
///
/// Which estimates decide:
///   * fresh confidences for coupled verification, whose output no choice can change;
///   * for ratio verification those of the block before, as far as they read no token that may be drawn
///     again: the choice must not depend on the drafts it is about (else their law is no longer exact);
///   * the block before for every sequence in flight, whose drafts do not exist yet;
///   * where nothing is known, of a new sequence or of a position, the share of the drafts there that stood
///     so far; certain in the beginning, so that there are outcomes.
///
/// It verifies everything where no curve is known, and where choosing would gain less than `min_gain` over
/// that.
///
/// Where plain decoding is faster no drafts are proposed at all. That is judged by what happens, for each
/// binary order of the number of sequences by itself: a step that proposes or verifies drafts loses the time
/// that it took beyond what plain steps would have taken for its tokens, and when the losses behind the gains
/// reach `kMaxLoss` plain steps, drafting pauses, each time for longer unless it has paid in between. While
/// it pauses, the newest estimates keep being weighed, and a probe proposes drafts now and then, so a change
/// of what is drafted is noticed: of a few sequences, for proposing takes time; of all in the rarest probes,
/// which show what such steps take by now. Drafts that are still at hand then are verified where that pays in
/// a step that proposes none. While drafts pay, a few plain steps now and then show what these really take,
/// and what steps with drafts really bring, in tokens per time, discounts what the model of them promises.
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
#include "progress_weights.hpp"
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
    double price = 0.0;         ///< gain that the next draft of the newest step would have needed
};

class ScheduledDraftBudget : public DraftBudget {
public:
    /// `step_time` and `calibration` are read at every choice and outlive the budget.
    ScheduledDraftBudget(const CoreConfig& config, const StepTime& step_time,
                         const DraftCalibration& calibration);

    void choose(std::span<const DraftCandidate> candidates, int32_t num_waiting,
                std::span<int32_t> num_drafts) override;
    int32_t num_drafting(int32_t num_seqs) const override;
    bool wants_first_drafts(int32_t num_running) const override {
        return num_plain_ == 0 && !regime_of(num_running).is_paused;
    }
    const DraftBudgetStats& stats() const { return stats_; }
    /// A step that verified or proposed drafts has emitted tokens.
    void observe(int32_t num_seqs, int32_t num_tokens, int32_t num_emitted, double ms, bool is_drafted);
    /// Forgets what was observed.
    void forget_observations() { regimes_ = {}; }

private:
    static constexpr double kMaxLoss = 3.0;         ///< plain steps that drafting may lose before it pauses
    static constexpr double kMaxStepLoss = 2.0;     ///< of one step, at most: it may have been disturbed
    static constexpr int32_t kMaxVain = 200;        ///< steps in a row without a draft worth verifying
    static constexpr double kResumeGain = 0.1;      ///< share by which drafts must win before they come back
    static constexpr int32_t kMinPause = 64;        ///< steps
    static constexpr int32_t kLongerPause = 4;      ///< times as long as the one before
    static constexpr int32_t kProbeInterval = 64;   ///< steps until the first probe
    static constexpr int32_t kMaxInterval = 2048;   ///< of probes and the like
    static constexpr int32_t kMinProbed = 4;        ///< sequences of a probe, at least;
    static constexpr int32_t kProbedShare = 8;      ///< else one of so many
    static constexpr int32_t kPlainInterval = 16;   ///< steps with drafts until the first plain ones
    static constexpr int32_t kNumPlain = 6;
    static constexpr double kUsualDrafts = 4.0;  ///< drafts of the usual kind that a new sequence counts with

    struct Choice {
        size_t num_items = 0;  ///< entries of the sorted list that are taken
        double worth_per_ms = 0.0;
        double tokens = 0.0;
    };

    /// What is known of steps of about as many sequences.
    struct Regime {
        static constexpr double kFade = 15.0 / 16.0;
        static constexpr int32_t kMinSteps = 8;

        // Of steps with drafts, sums that fade: what they promised, and what they brought.
        double promised_worth = 0.0, promised_tokens = 0.0, promised_ms = 0.0, tokens = 0.0, ms = 0.0;
        int32_t num_steps = 0;
        bool is_paused = false;
        double loss = 0.0;          ///< plain steps; negative where drafting has won
        int32_t num_vain = 0;       ///< steps in a row in which no draft was worth verifying
        int32_t num_paused = 0;     ///< steps since it paused
        int32_t pause = kMinPause;  ///< least steps of the next pause
        int32_t since_drafts = 0;   ///< steps since the last probe
        int32_t probe_interval = kProbeInterval;

        bool is_known() const { return num_steps >= kMinSteps && promised_ms > 0.0; }
        double share_kept() const;  ///< of the promised tokens per time, in 0.25 .. 1
        double worth() const { return promised_tokens > 0.0 ? promised_worth / promised_tokens : 1.0; }
        void add_loss(double steps);
        void begin_pause();
    };

    static size_t order_of(int32_t num_seqs) { return std::bit_width(static_cast<uint32_t>(num_seqs)); }
    Regime& regime_of(int32_t num_seqs) { return regimes_[order_of(num_seqs)]; }
    const Regime& regime_of(int32_t num_seqs) const { return regimes_[order_of(num_seqs)]; }
    double share_kept(int32_t num_seqs) const;
    bool is_observed(const Regime& regime) const {
        return regime.num_steps > 0 && step_time_.knows_plain_steps();
    }
    void weigh(std::span<const DraftCandidate> candidates, int32_t num_waiting);
    void list_gains(std::span<const DraftCandidate> candidates, bool is_potential);
    void find_looked_at(std::span<const DraftCandidate> candidates);
    const Sequence& estimated_by(size_t place, const Sequence& sequence) const;
    std::pair<Choice, Choice> walk(int32_t num_seqs, const StepTime::Curve& curve, double shift) const;
    void judge(Regime& regime, double drafted_per_ms, double plain_per_ms);
    void look_at_plain_steps();
    void count(int32_t num_seqs, bool has_drafts, size_t taken, bool takes_all);

    int32_t max_tokens_;
    double min_gain_;
    const StepTime& step_time_;
    const DraftCalibration& calibration_;

    /// A draft of the step, and the place in (sequence, position) order.
    struct Item {
        float gain;  ///< survival, weighted
        float survival;
        int32_t place;
        bool operator<(const Item& other) const {
            return gain > other.gain || (gain == other.gain && place < other.place);
        }
    };
    std::vector<Item> items_;  // these are reused between steps
    std::vector<const Sequence*> looked_at_;  ///< while drafting pauses: those of the newest probe
    std::vector<Progress> progress_;
    std::vector<double> weights_;
    bool is_paused_ = false;  ///< of the newest step
    bool is_probe_ = false;
    bool is_whole_probe_ = false;  ///< of all sequences
    int32_t num_plain_ = 0;  ///< steps still to come that propose no drafts, to learn what they take
    int32_t steps_since_plain_ = 0;
    int32_t plain_interval_ = kPlainInterval;
    std::array<Regime, 33> regimes_{};  ///< by the binary order of the number of sequences
    DraftBudgetStats stats_;
};

}  // namespace deepinfer
