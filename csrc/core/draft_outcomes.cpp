#include "draft_outcomes.hpp"

#include <algorithm>

namespace deepinfer {
namespace {

/// Leading drafts at hand whose confidence is an estimate.
int32_t num_estimated(const Sequence& sequence) {
    const DraftEstimates& estimates = sequence.newest_estimates;
    const int32_t count = std::min<int32_t>(sequence.num_drafts, estimates.size);
    int32_t size = 0;
    while (size < count && estimates.confidences[size] > 0.0f) ++size;
    return size;
}

void follow(Sequence& sequence, int32_t num_new, DraftCalibration& calibration) {
    FollowedBlock& block = sequence.followed;
    if (block.size == 0) {
        // Drafts behind the end are left out: whether a block stands or not, nothing would be known of them.
        const int32_t tokens_left = sequence.limit_length - (sequence.length() - num_new);
        block.size = static_cast<uint8_t>(std::min(num_estimated(sequence), tokens_left));
        block.num_accepted = 0;
        block.drafts = sequence.drafts;
        block.confidences = sequence.newest_estimates.confidences;
    }
    for (auto token = sequence.tokens.end() - num_new; token != sequence.tokens.end(); ++token) {
        if (block.size == 0) return;
        if (block.num_accepted == block.size) {  // the token behind a block that stood: no draft of its own
            block.size = 0;
            return;
        }
        const int32_t position = block.num_accepted;
        const bool stands = *token == block.drafts[position];
        calibration.add_outcome(position, block.confidences[position], stands);
        if (stands) ++block.num_accepted;
        if (stands && block.num_accepted < block.size) continue;
        calibration.add_block(block.confidences, block.size, block.num_accepted);
        if (!stands) block.size = 0;
    }
    if (sequence.is_finished() && block.num_accepted < block.size) {
        // Nobody will know what lies behind the end.
        calibration.add_block(block.confidences, block.num_accepted, block.num_accepted);
        block.size = 0;
    }
}

}  // namespace

void learn_from_step(Sequence& sequence, int32_t num_new, int32_t num_verified, int32_t num_emitted,
                     DraftCalibration& calibration) {
    if (!sequence.params.golden_token_ids.empty()) return;  // forced tokens say nothing about the drafter
    if (!sequence.is_ratio()) {
        follow(sequence, num_new, calibration);
        return;
    }
    const DraftEstimates& estimates = sequence.newest_estimates;
    const int32_t num_known = std::min(num_verified, num_estimated(sequence));
    for (int32_t j = 0; j < std::min(num_known, num_emitted); ++j) {
        calibration.add_outcome(j, estimates.confidences[j], j + 1 < num_emitted);
    }
    if (num_verified == sequence.num_drafts)
        calibration.add_block(estimates.confidences, num_known, std::min(num_known, num_emitted - 1));
}

}  // namespace deepinfer
