#include "draft_budget.hpp"

namespace deepinfer {

void FixedDraftBudget::choose(std::span<const DraftCandidate> candidates, int32_t /*num_waiting*/,
                              std::span<int32_t> num_drafts) {
    for (size_t i = 0; i < candidates.size(); ++i) num_drafts[i] = candidates[i].max_drafts;
}

}  // namespace deepinfer
