/// StepPlan: what one step does. It owns its memory and does not change after scheduling, but for the rows of
/// its sequences where the device deals them anew (`EngineCore::set_seqlens_q`).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "sequence.hpp"
#include "types.hpp"

namespace deepinfer {

/// One sequence of a plan. Its query rows are consecutive positions `start .. start + num_rows - 1`; its
/// output rows are `num_scoring` rows from position `first_scoring` on (prompt log-probabilities), then
/// `num_samples` rows that end with the last query row. Block table and state slot are read from the
/// sequence, which keeps them until the commit.
struct PlanSequence {
    Sequence* sequence = nullptr;  ///< valid until the plan is committed
    int64_t id = 0;
    int32_t start =
        0;  ///< position of the first row; the most possible when `remap >= 0` and the step decodes
    int32_t num_rows = 0;
    int32_t max_rows = 0;      ///< most rows that the device may make of them
    int32_t known_length = 0;  ///< committed tokens when it was scheduled
    int32_t total_length = 0;  ///< prefill: tokens up to which the chunks' decoder rows leave a whole state
    int32_t num_samples = 0;
    int32_t first_scoring = 0;
    int32_t num_scoring = 0;
    int32_t remap = -1;  ///< index of the same sequence in the plan in flight

    int32_t end() const { return start + num_rows; }
    int32_t max_end() const { return start + max_rows; }
    int32_t num_outputs() const { return num_scoring + num_samples; }
};

/// Bytes of one slot or block that go to another.
struct Copy {
    int32_t source = 0;
    int32_t target = 0;
};

/// The state of a sequence at a border that the step reaches, or in a decode step may pass, to be known once
/// the step is committed.
struct Snapshot {
    Sequence* sequence = nullptr;
    int32_t border = 0;
    int32_t slot = 0;  ///< held by the plan
};

/// Sparse sampling inputs, collected once per plan.
struct SparseInputs {
    std::vector<int32_t> penalty_rows, penalty_tokens, penalty_counts;
    std::vector<int32_t> bias_rows, bias_tokens;
    std::vector<float> bias_values;
    std::vector<int32_t> ban_rows, ban_tokens;
    std::vector<int32_t> allowed_rows, allowed_offsets, allowed_tokens;
};

struct StepPlan {
    int64_t step = 0;  ///< 1, 2, ... in schedule order
    StepKind kind = StepKind::kDecode;
    std::vector<PlanSequence> sequences;  // [S]
    std::vector<int64_t> preempted_ids;   ///< preempted while this step was scheduled
    // Of each list all sources are read before any target is written.
    std::vector<Copy> slot_copies;        ///< before the forward
    std::vector<Copy> state_copies;       ///< slots, behind everything else that the step does
    std::vector<Copy> block_copies;       ///< likewise
    std::vector<Snapshot> snapshots;      ///< targets of `state_copies` that belong to no sequence
    std::vector<int64_t> forked_ids;      ///< sequences that the others belong to
    int32_t num_rows = 0;                 ///< Q
    int32_t num_outputs = 0;              ///< R
    int32_t max_blocks = 0;               ///< columns of the block tables
    int32_t max_seqlen_q = 0;
    int32_t max_seqlen_k = 0;  ///< whatever rows the device deals to whom
    int32_t num_matched = 0;   ///< sequences that are also in the plan in flight
    int32_t num_draft_rows = 0;
    int32_t first_drafting = 0;  ///< the sequences from here on propose drafts at the end of the step
    /// The device deals the rows of matched sequences anew; the others keep theirs.
    bool can_redistribute = false;
    bool has_dealt_rows = false;         ///< the host knows how
    std::vector<float> confidence_odds;  ///< then [num_draft_tokens]: the correction of its confidences
    int32_t max_num_logprobs = -1;
    int32_t num_running = 0;  ///< after scheduling, as the next two
    int32_t num_waiting = 0;
    int32_t num_free_blocks = 0;
    double attention_flops = 0.0;
    std::atomic<bool> is_outstanding{true};  ///< neither committed nor discarded

    SparseInputs sparse;  ///< filled by the sampling layout
    bool has_sparse = false;

    int32_t num_seqs() const { return static_cast<int32_t>(sequences.size()); }
    int32_t num_drafting() const { return std::max(0, num_seqs() - first_drafting); }
    bool is_settled() const { return has_dealt_rows || !can_redistribute; }
    bool has_copies() const {
        return !slot_copies.empty() || !state_copies.empty() || !block_copies.empty();
    }
    bool is_prefill() const { return kind == StepKind::kPrefill; }
};

}  // namespace deepinfer
