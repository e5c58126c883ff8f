#include "config.hpp"

#include "check.hpp"

namespace deepinfer {
namespace {

template <typename T, typename U>
void require_at_least(const char* name, T value, U minimum, const char* why) {
    if (value < static_cast<T>(minimum)) {
        throw std::invalid_argument(
            concat(name, "=", value, " is too small: it must be >= ", minimum, " (", why, ")"));
    }
}

}  // namespace

void CoreConfig::validate() const {
    require_at_least("max_num_seqs", max_num_seqs, 1, "sequences at once");
    require_at_least("max_model_len", max_model_len, 2, "one prompt token and one output token");
    require_at_least("block_size", block_size, 1, "tokens per block");
    require_at_least("num_blocks", num_blocks, 2, "block 0 is reserved");
    require_at_least("num_state_slots", num_state_slots, 2, "slot 0 is reserved");
    require_at_least("vocab_size", vocab_size, 0, "0 checks nothing");
    require_at_least("num_draft_tokens", num_draft_tokens, 0, "drafts per sequence");
    require_at_least("replay_keep_tokens", replay_keep_tokens, 0, "0 keeps all");
    if (num_draft_tokens > kMaxDrafts) {
        throw std::invalid_argument(
            concat("num_draft_tokens=", num_draft_tokens, " must be <= ", kMaxDrafts));
    }
    require_at_least("max_num_batched_tokens", int64_t{max_num_batched_tokens},
                     int64_t{max_num_seqs} * (1 + num_draft_tokens),
                     "a decode step holds max_num_seqs * (1 + num_draft_tokens) rows");
    if (!chunked_prefill) {
        require_at_least("max_num_batched_tokens", max_num_batched_tokens, max_model_len,
                         "without chunked prefill a step holds a whole prompt of max_model_len");
    }
    require_at_least("max_sum_seqlen_k", max_sum_seqlen_k, max_model_len, "one sequence of max_model_len");
    require_at_least("max_prefill_tflops", max_prefill_tflops, 0.0, "0 means no limit");
    if (max_prefill_tflops > 0.0 && attention_terms.empty()) {
        throw std::invalid_argument(
            "max_prefill_tflops needs attention_terms: without them every prompt is free");
    }
    require_at_least("min_prefill_chunk", min_prefill_chunk, 1, "tokens");
    require_at_least("prefill_attempt_interval", prefill_attempt_interval, 1, "decode steps");
    require_at_least("max_overtakes", max_overtakes, 0, "0 admits in strict order");
    require_at_least("admission_headroom_tokens", admission_headroom_tokens, 0, "tokens");
    require_at_least("max_preemptions", max_preemptions, 0, "0 spares every sequence from younger ones");
    require_at_least("swap_limit_bytes", swap_limit_bytes, 0, "0 swaps nothing");
    if (preemption_mode != PreemptionMode::kRecompute) {
        require_at_least("block_bytes", block_bytes, 1, "swapping counts with them");
        require_at_least("slot_bytes", slot_bytes, 1, "swapping counts with them");
        require_at_least("draft_score_bytes", draft_score_bytes, 0, "0: there is no such draft");
    }
    require_at_least("draft_budget_min_gain", draft_budget_min_gain, 0.0, "a share of the throughput");
    require_at_least("max_ngram", max_ngram, 0, "columns of ngram_ids");
    require_at_least("prefix_state_interval", prefix_state_interval, 0, "0: the last border only");
    if (prefix_state_interval % block_size != 0) {
        throw std::invalid_argument(concat("prefix_state_interval=", prefix_state_interval,
                                           " must be a multiple of block_size=", block_size));
    }
    require_at_least("prefix_hash_bits", prefix_hash_bits, 1, "bits");
    if (image_token_end < image_token_begin) {
        throw std::invalid_argument(
            concat("image token range [", image_token_begin, ", ", image_token_end, ") is empty backwards"));
    }
}

}  // namespace deepinfer
