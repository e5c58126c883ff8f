/// Which running sequences a decode step takes; growth of their block tables, and preemption when blocks are
/// short.
#pragma once

#include <cstdint>
#include <vector>

#include "core_state.hpp"
#include "draft_budget.hpp"

namespace deepinfer {

struct DecodeChoice {
    struct Row {
        Sequence* sequence;
        int32_t num_drafts;
        int32_t max_drafts;  ///< drafts that it has blocks for, should the device deal the rows anew
    };
    std::vector<Row> rows;               ///< in the order of `CoreState::running`
    std::vector<int64_t> preempted_ids;  ///< also those that were ended instead of recomputed
};

/// Chooses the sequences of a decode step and gives them their blocks.
///
/// Drafts never cause a preemption: when blocks are short they are cut first. Then sequences are served
/// shortest output first; one that needs a block when none is free takes it from the unserved sequence whose
/// recomputation costs least per block that comes free. A sequence preempted `max_preemptions` times is
/// served before all others, and only an older one of its kind may still take its blocks: the oldest of them
/// always moves on, so everybody finishes. Blocks of a victim that is in flight come at the commit; until
/// then the taker sits out, as it does when it needs the block only if its drafts in flight are accepted.
class DecodePolicy {
public:
    DecodeChoice choose(CoreState& state, DraftBudget& budget);

private:
    struct Candidate {
        Sequence* sequence;
        int32_t length;  ///< most tokens it can have by now
        int32_t num_drafts;
        int32_t max_drafts;
        bool is_served;
        bool is_gone;
    };

    bool try_everybody(CoreState& state);
    void serve_in_order(CoreState& state, DecodeChoice& choice);
    bool find_block(CoreState& state, size_t place, int32_t need, DecodeChoice& choice);

    int32_t num_blocks_ending_ = 0;          ///< held by sequences that surely end with the step in flight
    std::vector<Candidate> candidates_;      // reused between steps
    std::vector<DraftCandidate> questions_;  // for the budget
    std::vector<int32_t> answers_;
    std::vector<Candidate*> order_;
};

}  // namespace deepinfer
