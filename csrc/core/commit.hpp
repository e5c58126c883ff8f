/// Commit: what a finished step changes. Appends tokens, tests the stop conditions, frees what is no longer
/// needed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core_state.hpp"

namespace deepinfer {

/// Results of one step. R output rows, S sequences; empty spans are absent.
struct StepOutcome {
    std::span<const int32_t> tokens;  // [R] token of every row; those of scoring rows are ignored
    std::span<const int32_t>
        num_emitted;  // [S] accepted rows; absent: leading rows equal to their draft, plus one
    std::span<const float> logprobs;      // [R] of `tokens` (scoring rows: of the next prompt token)
    std::span<const int32_t> ranks;       // [R]
    std::span<const int32_t> top_ids;     // [R, top_width]
    std::span<const float> top_logprobs;  // [R, top_width]
    int32_t top_width = 0;
    std::span<const uint8_t> faults;     // [R] an ErrorKind
    std::span<const uint8_t> ends;       // [R] 1: the row's token ends its sequence with kStop, whatever else
    std::span<const int32_t> drafts;     // [S, draft_width] proposed after this step; -1 ends a row
    std::span<const float> confidences;  // [S, draft_width]
    int32_t draft_width = 0;
};

/// What the caller must know of a commit.
struct CommitResult {
    std::vector<int64_t> finished_ids;
    std::vector<uint8_t> finished_reasons;  // FinishReason
    std::vector<int32_t> num_new_tokens;    // [S]
    std::vector<int64_t> text_ids;          // sequences with `needs_text` and new tokens
    std::vector<int32_t> text_offsets;      // [len(text_ids) + 1] into text_tokens
    std::vector<int32_t> text_tokens;
    std::vector<double> first_token_latencies;  // seconds since arrival
    std::vector<int64_t> verified_by_position;  // [num_draft_tokens]
    std::vector<int64_t> accepted_by_position;  // [num_draft_tokens]
    int64_t num_tokens = 0;
    int64_t num_drafted = 0;   ///< drafts proposed
    int64_t num_verified = 0;  ///< drafts of earlier steps that had a row
    int64_t num_accepted = 0;
};

/// Checks the shapes and ids of `outcome` before anything changes. `vocab_size` 0 checks no ids.
void check_outcome(const StepPlan& plan, const StepOutcome& outcome, int32_t vocab_size, int32_t max_drafts);

/// Applies the oldest plan in flight.
CommitResult commit(CoreState& state, const StepOutcome& outcome);

}  // namespace deepinfer
