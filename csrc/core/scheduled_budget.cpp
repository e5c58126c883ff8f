#include "scheduled_budget.hpp"

#include <algorithm>

namespace deepinfer {
namespace {

/// Confidences of a block in flight that a ratio sequence may use: the first reads no draft, the second only
/// the first draft, whose place is settled when the block is.
constexpr int32_t kCausalInFlight = 2;

/// The estimates that may decide about the next block of a sequence.
struct Estimates {
    const DraftEstimates& of;
    int32_t size;
    bool is_old;  ///< of the block before

    explicit Estimates(const Sequence& sequence)
        : of(sequence.num_in_flight == 0 && sequence.is_ratio() ? sequence.previous_estimates
                                                                : sequence.newest_estimates),
          size(of.size),
          is_old(sequence.num_in_flight > 0 || sequence.is_ratio()) {
        if (sequence.num_in_flight > 0 && sequence.is_ratio()) size = std::min(size, kCausalInFlight);
    }
};

}  // namespace

ScheduledDraftBudget::ScheduledDraftBudget(const CoreConfig& config, const StepTime& step_time,
                                           const DraftCalibration& calibration)
    : max_tokens_(config.max_num_batched_tokens),
      min_gain_(config.draft_budget_min_gain),
      step_time_(step_time),
      calibration_(calibration) {}

void ScheduledDraftBudget::choose(std::span<const DraftCandidate> candidates, int32_t num_waiting,
                                  std::span<int32_t> num_drafts) {
    for (size_t i = 0; i < candidates.size(); ++i) num_drafts[i] = candidates[i].max_drafts;
    if (candidates.empty()) return;
    const bool has_drafts =
        std::any_of(candidates.begin(), candidates.end(), [](const auto& c) { return c.max_drafts > 0; });
    if (!step_time_.is_known()) {
        is_paused_ = false;
        count(static_cast<int32_t>(candidates.size()), has_drafts, 0, true);
        return;
    }
    const int32_t num_seqs = static_cast<int32_t>(candidates.size());
    const StepTime::Curve curve = step_time_.at(num_seqs);
    const double undrafted_ms = step_time_.undrafted_ms(num_seqs);
    const double plain = num_seqs / undrafted_ms;
    Regime& regime = regime_of(num_seqs);
    // While drafting pauses few sequences have drafts: it comes back for what all would have.
    const bool is_potential = !has_drafts || regime.is_paused;
    weigh(candidates, num_waiting);
    looked_at_.clear();
    if (regime.is_paused) find_looked_at(candidates);
    list_gains(candidates, is_potential);
    const auto [best, longest] = walk(num_seqs, curve, 0.0);
    const bool is_gain_too_small =
        longest.worth_per_ms > plain && best.worth_per_ms < (1.0 + min_gain_) * longest.worth_per_ms;
    Choice choice = is_gain_too_small ? longest : best;
    is_probe_ = false;
    if (!items_.empty()) judge(regime, choice.worth_per_ms * share_kept(num_seqs), plain);
    is_paused_ = regime.is_paused;
    look_at_plain_steps();
    looked_at_.clear();
    if (has_drafts && is_potential) list_gains(candidates, false);
    const bool is_drafted = num_drafting(num_seqs) == num_seqs;  // a probe of a few takes little
    if (has_drafts && (is_potential || !is_drafted)) {
        choice = walk(num_seqs, curve, is_drafted ? 0.0 : undrafted_ms - curve(num_seqs)).first;
    }
    const int32_t taken = num_seqs + static_cast<int32_t>(choice.num_items);
    if (choice.num_items > 0 && has_drafts && is_drafted) {
        regime.promised_worth = regime.promised_worth * Regime::kFade + choice.worth_per_ms * curve(taken);
        regime.promised_tokens = regime.promised_tokens * Regime::kFade + choice.tokens;
        regime.promised_ms = regime.promised_ms * Regime::kFade + curve(taken);
    }
    stats_.price = choice.worth_per_ms * (curve(taken + 1) - curve(taken));
    const bool takes_all = choice.num_items == items_.size();
    count(num_seqs, has_drafts, choice.num_items, takes_all);
    if (!has_drafts || takes_all) return;
    std::fill(num_drafts.begin(), num_drafts.end(), 0);
    for (size_t i = 0; i < choice.num_items; ++i) ++num_drafts[items_[i].place / kMaxDrafts];
}

int32_t ScheduledDraftBudget::num_drafting(int32_t num_seqs) const {
    if (num_plain_ > 0 || (is_paused_ && !is_probe_)) return 0;
    if (!is_paused_ || is_whole_probe_) return num_seqs;
    return std::min(num_seqs, std::max(kMinProbed, num_seqs / kProbedShare));
}

/// A sequence is as fast as if all its drafts stood as often as the first ones of its blocks did so far.
void ScheduledDraftBudget::weigh(std::span<const DraftCandidate> candidates, int32_t num_waiting) {
    progress_.clear();
    const double usual = calibration_.acceptance(0);
    for (const DraftCandidate& candidate : candidates) {
        const Sequence& sequence = *candidate.sequence;
        const SequenceMetrics& metrics = sequence.metrics;
        const double stands = (metrics.accepted_by_position[0] + kUsualDrafts * usual) /
                              (metrics.verified_by_position[0] + kUsualDrafts);
        double tokens = 1.0, survival = 1.0;
        for (int32_t j = 0; j < candidate.most_drafts; ++j) tokens += survival *= stands;
        progress_.push_back({std::max(1, sequence.limit_length - sequence.next_length()), tokens});
    }
    weigh_progress(progress_, num_waiting, step_time_.plain_curve_ms(1),
                   step_time_.plain_curve_ms(static_cast<int32_t>(candidates.size())), weights_);
}

/// The sequences that were drafted last.
void ScheduledDraftBudget::find_looked_at(std::span<const DraftCandidate> candidates) {
    int64_t newest = 1;
    for (const DraftCandidate& candidate : candidates)
        newest = std::max(newest, candidate.sequence->drafted_at);
    for (const DraftCandidate& candidate : candidates) {
        if (candidate.sequence->drafted_at == newest) looked_at_.push_back(candidate.sequence);
    }
    if (std::ssize(looked_at_) < kMinProbed) looked_at_.clear();  // too few to speak for others
}

/// Whose estimates count for the sequence at a place: its own, but for older ones those of a sequence that
/// was looked at since.
const Sequence& ScheduledDraftBudget::estimated_by(size_t place, const Sequence& sequence) const {
    if (looked_at_.empty() || sequence.drafted_at == 0) return sequence;
    if (sequence.drafted_at == looked_at_.front()->drafted_at) return sequence;
    return *looked_at_[place % looked_at_.size()];
}

/// Gains of the drafts at hand, or of those that there could be, best first.
void ScheduledDraftBudget::list_gains(std::span<const DraftCandidate> candidates, bool is_potential) {
    items_.clear();
    for (size_t i = 0; i < candidates.size(); ++i) {
        const DraftCandidate& candidate = candidates[i];
        const Estimates estimates(estimated_by(i, *candidate.sequence));
        const int32_t count = is_potential ? candidate.most_drafts : candidate.max_drafts;
        float survival = 1.0f;
        for (int32_t j = 0; j < count; ++j) {
            const float given = j < estimates.size ? estimates.of.confidences[j] : 0.0f;
            const bool is_given = j < estimates.size && !(estimates.is_old && given == 0.0f);
            survival *= is_given ? calibration_.corrected(j, given) : calibration_.acceptance(j);
            const float gain = static_cast<float>(weights_[i]) * survival;
            items_.push_back({gain, survival, static_cast<int32_t>(i) * kMaxDrafts + j});
        }
    }
    std::sort(items_.begin(), items_.end());
}

/// The best prefix of the list, and the longest one that fits, for steps that take `shift` more than the
/// curve.
std::pair<ScheduledDraftBudget::Choice, ScheduledDraftBudget::Choice> ScheduledDraftBudget::walk(
    int32_t num_seqs, const StepTime::Curve& curve, double shift) const {
    Choice prefix{0, num_seqs / (curve(num_seqs) + shift), double(num_seqs)};
    Choice best = prefix;
    double worth = num_seqs, tokens = num_seqs;
    const int32_t limit = std::min(max_tokens_, std::max(step_time_.max_tokens(), num_seqs));
    const size_t most = std::min(items_.size(), static_cast<size_t>(limit - num_seqs));
    for (size_t i = 0; i < most; ++i) {
        worth += double(items_[i].gain);
        tokens += double(items_[i].survival);
        prefix = {i + 1, worth / (curve(num_seqs + static_cast<int32_t>(i) + 1) + shift), tokens};
        if (prefix.worth_per_ms > best.worth_per_ms) best = prefix;
    }
    return {best, prefix};
}

/// Whether drafts are worth proposing, from the best rate with them and that of plain decoding. Promises only
/// count until both kinds of steps have been observed, and to come back.
void ScheduledDraftBudget::judge(Regime& regime, double drafted_per_ms, double plain_per_ms) {
    if (!regime.is_paused) {
        regime.num_vain = drafted_per_ms > plain_per_ms ? 0 : regime.num_vain + 1;
        if (regime.num_vain > kMaxVain) regime.begin_pause();
        if (!is_observed(regime)) regime.add_loss(plain_per_ms / drafted_per_ms - 1.0);
        return;
    }
    ++regime.num_paused;
    if (regime.num_paused >= regime.pause && drafted_per_ms > plain_per_ms * (1.0 + kResumeGain)) {
        regime.is_paused = false;
        regime.loss = 0.0;
        regime.pause = std::min(kLongerPause * regime.pause, kMaxInterval);
        regime.probe_interval = kProbeInterval;
    } else if (++regime.since_drafts >= regime.probe_interval) {
        is_probe_ = true;
        is_whole_probe_ = regime.probe_interval == kMaxInterval;
        regime.since_drafts = 0;
        regime.probe_interval = std::min(2 * regime.probe_interval, kMaxInterval);
    }
}

void ScheduledDraftBudget::Regime::add_loss(double steps) {
    loss = std::max(loss + std::min(steps, kMaxStepLoss), -kMaxLoss);
    if (loss == -kMaxLoss) pause = kMinPause;  // it pays
    if (loss > kMaxLoss) begin_pause();
}

void ScheduledDraftBudget::Regime::begin_pause() {
    is_paused = true;
    num_vain = num_paused = since_drafts = 0;
}

double ScheduledDraftBudget::Regime::share_kept() const {
    return std::clamp(tokens / ms / (promised_tokens / promised_ms), 0.25, 1.0);
}

/// As many sequences as these have kept, or the next order of them that is known.
double ScheduledDraftBudget::share_kept(int32_t num_seqs) const {
    const int32_t own = std::bit_width(static_cast<uint32_t>(num_seqs));
    const int32_t count = static_cast<int32_t>(regimes_.size());
    for (int32_t distance = 0; distance < count; ++distance) {
        for (const int32_t order : {own - distance, own + distance}) {
            if (order < 0 || order >= count || !regimes_[order].is_known()) continue;
            return regimes_[order].share_kept();
        }
    }
    return 1.0;
}

void ScheduledDraftBudget::observe(int32_t num_seqs, int32_t num_tokens, int32_t num_emitted, double ms,
                                   bool is_drafted) {
    if (!step_time_.is_known()) return;
    Regime& regime = regime_of(num_seqs);
    if (is_drafted && num_tokens > num_seqs) {
        regime.tokens = regime.tokens * Regime::kFade + num_emitted;
        regime.ms = regime.ms * Regime::kFade + ms;
        ++regime.num_steps;
    }
    if (!regime.is_paused && is_observed(regime)) {
        regime.add_loss(ms / step_time_.undrafted_ms(num_seqs) - num_emitted * regime.worth() / num_seqs);
    }
}

/// A few plain steps after 16 steps with drafts, after 32 more, ...: the rarer the better they are known.
void ScheduledDraftBudget::look_at_plain_steps() {
    if (num_plain_ > 0) {
        --num_plain_;
    } else if (!is_paused_ && step_time_.has_undrafted() && ++steps_since_plain_ >= plain_interval_) {
        num_plain_ = kNumPlain;
        steps_since_plain_ = 0;
        plain_interval_ = std::min(2 * plain_interval_, kMaxInterval);
    }
}

void ScheduledDraftBudget::count(int32_t num_seqs, bool has_drafts, size_t taken, bool takes_all) {
    ++stats_.num_steps;
    if (has_drafts) ++(takes_all ? stats_.num_full : taken > 0 ? stats_.num_cut : stats_.num_none);
    if (num_drafting(num_seqs) == 0) ++stats_.num_undrafted;
    if (is_probe_) ++stats_.num_probes;
}

}  // namespace deepinfer
