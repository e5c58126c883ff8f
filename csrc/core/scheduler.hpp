/// Scheduler: the order of decisions of one step, nothing else. The policies decide, `CoreState` moves.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "core_state.hpp"
#include "decode_policy.hpp"
#include "draft_budget.hpp"
#include "prefill_policy.hpp"

namespace deepinfer {

class Scheduler {
public:
    explicit Scheduler(std::unique_ptr<DraftBudget> budget);

    /// Whether the next step should be a prefill: something admissible waits and decodes have had their
    /// steps.
    bool wants_prefill(CoreState& state) const;

    /// Plans one step and takes its resources; null when nothing can run before a commit or a new request.
    /// `kind` forces the step's type (data-parallel ranks agree on it); then null means "not possible now".
    std::shared_ptr<StepPlan> schedule(CoreState& state, std::optional<StepKind> kind);

private:
    std::shared_ptr<StepPlan> plan_prefill(CoreState& state);
    std::shared_ptr<StepPlan> plan_decode(CoreState& state, std::vector<int64_t>& preempted_ids);

    std::unique_ptr<DraftBudget> budget_;
    DecodePolicy decode_policy_;
};

/// The device has dealt the rows of the newest plan anew: `seqlens_q` [S] with the planned sum, within each
/// sequence's limit. Throws `std::invalid_argument` before anything changes.
void settle_rows(CoreState& state, StepPlan& plan, std::span<const int32_t> seqlens_q);

}  // namespace deepinfer
