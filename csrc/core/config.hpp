/// Limits of the scheduler, filled by Python once per engine.
#pragma once

#include <cstdint>
#include <vector>

#include "flops.hpp"
#include "types.hpp"

namespace deepinfer {

struct CoreConfig {
    Role role = Role::kNormal;
    int32_t max_num_seqs = 256;             ///< sequences that hold a state slot at once
    int32_t max_num_batched_tokens = 4096;  ///< query rows of a step
    int32_t max_model_len = 4096;           ///< prompt + output tokens, inclusive
    int32_t vocab_size = 0;                 ///< token ids are checked against it; 0 checks nothing
    int32_t block_size = 128;               ///< tokens per block
    int32_t num_blocks = 0;                 ///< pool size, reserved block 0 included
    int32_t num_state_slots = 0;            ///< pool size, reserved slot 0 included
    bool chunked_prefill = true;
    int32_t min_prefill_chunk = 1;  ///< shorter partial chunks only open an otherwise empty step
    int64_t max_sum_seqlen_k = int64_t{1} << 30;  ///< sum of total lengths in a prefill step
    double max_prefill_tflops = 0.0;              ///< attention work of a prefill step; 0 means no limit
    std::vector<AttentionTerm> attention_terms;
    double flops_per_token = 1.0;          ///< work of a row that does not depend on its position
    int32_t prefill_attempt_interval = 1;  ///< decode steps between prefill steps while something decodes
    int32_t max_overtakes = 64;            ///< later requests that may pass one that does not fit
    int32_t admission_headroom_tokens =
        32;                       ///< growth of every running sequence that an admission must leave room for
    int32_t max_preemptions = 2;  ///< after so many a sequence goes first and is spared
    bool stop_preempted_request = false;  ///< preemption ends the request instead of recomputing it
    PreemptionMode preemption_mode = PreemptionMode::kRecompute;
    int64_t swap_limit_bytes = 0;         ///< host memory for the bytes of preempted sequences
    int64_t block_bytes = 0;              ///< of one block, which swapping counts with, as the next two
    int64_t slot_bytes = 0;               ///< of one state slot
    int64_t draft_score_bytes = 0;        ///< of the scores of one draft that is tested by ratio
    int32_t num_draft_tokens = 0;         ///< most drafts verified per sequence and step
    bool use_draft_budget = false;        ///< choose how many drafts to verify; else all
    double draft_budget_min_gain = 0.02;  ///< verify all drafts unless choosing gains this share
    bool async_scheduling = false;        ///< one plan may be in flight while the next is scheduled
    bool prefix_caching = false;          ///< reuse blocks and states of equal prefixes
    int32_t prefix_state_interval = 0;    ///< tokens between states kept of a prompt; 0: at its end only
    uint64_t prefix_salt = 0;             ///< part of every prefix hash: which model, which weights
    int32_t prefix_hash_bits = 128;       ///< fewer make hashes collide, which tests want
    int32_t max_ngram = 0;                ///< columns of ngram_ids
    int32_t image_token_begin = -1;       ///< ids [begin, end) are image tokens and block n-gram windows
    int32_t image_token_end = -1;
    int32_t replay_keep_tokens = 0;       ///< newest prompt tokens that bounded replay keeps; 0: off

    /// Throws `std::invalid_argument` naming the first value that cannot work.
    void validate() const;

    int32_t blocks_for(int32_t num_tokens) const { return div_up(num_tokens, block_size); }
    /// Whether the device deals the rows of a decode step anew, by estimates that the host has not seen yet.
    bool redistributes() const { return use_draft_budget && async_scheduling && num_draft_tokens > 0; }
    bool is_image_token(int32_t id) const { return id >= image_token_begin && id < image_token_end; }
};

}  // namespace deepinfer
