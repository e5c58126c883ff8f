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

void ScheduledDraftBudget::choose(std::span<const DraftCandidate> candidates, std::span<int32_t> num_drafts) {
    for (size_t i = 0; i < candidates.size(); ++i) num_drafts[i] = candidates[i].max_drafts;
    if (candidates.empty()) return;
    const bool has_drafts =
        std::any_of(candidates.begin(), candidates.end(), [](const auto& c) { return c.max_drafts > 0; });
    if (!step_time_.is_known()) {
        is_paused_ = false;
        count(has_drafts, 0, true);
        return;
    }
    const int32_t num_seqs = static_cast<int32_t>(candidates.size());
    const StepTime::Curve curve = step_time_.at(num_seqs);
    const double undrafted_ms = step_time_.undrafted_ms(num_seqs);
    const double plain = num_seqs / undrafted_ms;
    list_survivals(candidates, !has_drafts);
    const auto [best, longest] = walk(num_seqs, curve, 0.0);
    const bool is_gain_too_small =
        longest.tokens_per_ms > plain && best.tokens_per_ms < (1.0 + min_gain_) * longest.tokens_per_ms;
    Choice choice = is_gain_too_small ? longest : best;
    Rates& rates = rates_of(num_seqs);
    if (!items_.empty()) judge(choice.tokens_per_ms * rates.share_kept(), plain);
    look_at_plain_steps();
    if (has_drafts && !wants_drafts()) choice = walk(num_seqs, curve, undrafted_ms - curve(num_seqs)).first;
    const int32_t taken = num_seqs + static_cast<int32_t>(choice.num_items);
    if (choice.num_items > 0 && has_drafts && wants_drafts()) {
        rates.promised_tokens = rates.promised_tokens * Rates::kFade + choice.tokens_per_ms * curve(taken);
        rates.promised_ms = rates.promised_ms * Rates::kFade + curve(taken);
    }
    stats_.price = choice.tokens_per_ms * (curve(taken + 1) - curve(taken));
    const bool takes_all = choice.num_items == items_.size();
    count(has_drafts, choice.num_items, takes_all);
    if (!has_drafts || takes_all) return;
    std::fill(num_drafts.begin(), num_drafts.end(), 0);
    for (size_t i = 0; i < choice.num_items; ++i) ++num_drafts[items_[i].place / kMaxDrafts];
}

/// Survivals of the drafts at hand, or of those that there could be, best first.
void ScheduledDraftBudget::list_survivals(std::span<const DraftCandidate> candidates, bool is_potential) {
    items_.clear();
    for (size_t i = 0; i < candidates.size(); ++i) {
        const DraftCandidate& candidate = candidates[i];
        const Estimates estimates(*candidate.sequence);
        const int32_t count = is_potential ? candidate.most_drafts : candidate.max_drafts;
        float survival = 1.0f;
        for (int32_t j = 0; j < count; ++j) {
            const float given = j < estimates.size ? estimates.of.confidences[j] : 0.0f;
            const bool is_given = j < estimates.size && !(estimates.is_old && given == 0.0f);
            survival *= is_given ? calibration_.corrected(j, given) : calibration_.acceptance(j);
            items_.push_back({survival, static_cast<int32_t>(i) * kMaxDrafts + j});
        }
    }
    std::sort(items_.begin(), items_.end());
}

/// The best prefix of the list, and the longest one that fits, for steps that take `shift` more than the curve.
std::pair<ScheduledDraftBudget::Choice, ScheduledDraftBudget::Choice> ScheduledDraftBudget::walk(
    int32_t num_seqs, const StepTime::Curve& curve, double shift) const {
    Choice prefix{0, num_seqs / (curve(num_seqs) + shift)};
    Choice best = prefix;
    double tokens = num_seqs;
    const int32_t limit = std::min(max_tokens_, std::max(step_time_.max_tokens(), num_seqs));
    const size_t most = std::min(items_.size(), static_cast<size_t>(limit - num_seqs));
    for (size_t i = 0; i < most; ++i) {
        tokens += double(items_[i].survival);
        prefix = {i + 1, tokens / (curve(num_seqs + static_cast<int32_t>(i) + 1) + shift)};
        if (prefix.tokens_per_ms > best.tokens_per_ms) best = prefix;
    }
    return {best, prefix};
}

/// Whether drafts are worth proposing, from the best rate with them and that of plain decoding.
void ScheduledDraftBudget::judge(double tokens_per_ms, double plain_per_ms) {
    if (tokens_per_ms > plain_per_ms * (is_paused_ ? 1.0 + kResumeGain : 1.0)) {
        is_paused_ = false;
        num_losing_ = 0;
        loss_ = 0.0;
        probe_interval_ = kProbeInterval;
    } else if (!is_paused_) {
        loss_ += plain_per_ms / tokens_per_ms - 1.0;
        is_paused_ = ++num_losing_ > kMaxLosing || loss_ > kMaxLoss;
        steps_since_drafts_ = 0;
    }
    is_probe_ = is_paused_ && ++steps_since_drafts_ >= probe_interval_;
    if (is_probe_) {
        steps_since_drafts_ = 0;
        probe_interval_ = std::min(2 * probe_interval_, kMaxProbeInterval);
    }
}

double ScheduledDraftBudget::Rates::share_kept() const {
    if (num_steps < kMinSteps || promised_ms <= 0.0) return 1.0;
    return std::clamp(tokens / ms / (promised_tokens / promised_ms), 0.25, 1.0);
}

void ScheduledDraftBudget::observe(int32_t num_seqs, int32_t num_emitted, double ms) {
    Rates& rates = rates_of(num_seqs);
    rates.tokens = rates.tokens * Rates::kFade + num_emitted;
    rates.ms = rates.ms * Rates::kFade + ms;
    ++rates.num_steps;
}

/// A few plain steps after 16 steps with drafts, after 32 more, ...: the rarer the better they are known.
void ScheduledDraftBudget::look_at_plain_steps() {
    if (num_plain_ > 0) {
        --num_plain_;
    } else if (!is_paused_ && step_time_.has_undrafted() && ++steps_since_plain_ >= plain_interval_) {
        num_plain_ = kNumPlain;
        steps_since_plain_ = 0;
        plain_interval_ = std::min(2 * plain_interval_, kMaxProbeInterval);
    }
}

void ScheduledDraftBudget::count(bool has_drafts, size_t taken, bool takes_all) {
    ++stats_.num_steps;
    if (has_drafts) ++(takes_all ? stats_.num_full : taken > 0 ? stats_.num_cut : stats_.num_none);
    if (!wants_drafts()) ++stats_.num_undrafted;
    if (is_probe_) ++stats_.num_probes;
}

}  // namespace deepinfer
