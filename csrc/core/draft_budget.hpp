/// How many drafts each sequence of a decode step verifies.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "sequence.hpp"

namespace deepinfer {

/// What a budget may look at.
struct DraftCandidate {
    const Sequence* sequence;
    int32_t max_drafts;   ///< upper bound: drafts at hand, the configured limit, tokens left to the end
    int32_t most_drafts;  ///< upper bound if it had drafts
};

/// Decides verify lengths. Called once per decode step, before blocks are taken (which may shorten the
/// result).
class DraftBudget {
public:
    virtual ~DraftBudget() = default;
    /// Writes num_drafts[i] in 0 .. candidates[i].max_drafts; `num_waiting` other sequences wait for a place.
    virtual void choose(std::span<const DraftCandidate> candidates, int32_t num_waiting,
                        std::span<int32_t> num_drafts) = 0;
    /// How many of the `num_seqs` sequences of the decode step that was chosen for last should propose drafts
    /// at its end: the last ones of it.
    virtual int32_t num_drafting(int32_t num_seqs) const { return num_seqs; }
    /// Whether those of a prefill step should, behind which `num_running` sequences decode.
    virtual bool wants_first_drafts([[maybe_unused]] int32_t num_running) const { return true; }
};

/// Verifies every draft at hand.
class FixedDraftBudget : public DraftBudget {
public:
    void choose(std::span<const DraftCandidate> candidates, int32_t num_waiting,
                std::span<int32_t> num_drafts) override;
};

}  // namespace deepinfer
