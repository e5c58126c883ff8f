/// State of one request, in small structs, and the pool that owns all of them.
///
/// Lengths: `tokens` holds prompt and committed output tokens, never drafts. `num_computed` of them have
/// their KV in the caches; a running sequence has all but the last. A step that is scheduled but not
/// committed is "in flight": its rows may add tokens, so `next_length()` and `next_computed()` are what the
/// sequence will be at most.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "prefix_hash.hpp"
#include "types.hpp"

namespace deepinfer {

/// What prompt tokens [first_token, first_token + num_tokens) stand for beyond their ids, such as the pixels
/// of an image. What is computed under a key is shared only under equal keys at the same tokens.
struct ContentKey {
    int32_t first_token = 0;
    int32_t num_tokens = 0;
    std::string key;  ///< bytes, not empty

    bool operator==(const ContentKey&) const = default;
};

/// What a caller asks of one sequence; field names follow deepinfer/sampling_params.py.
struct SequenceParams {
    int32_t max_tokens = -1;           ///< most output tokens; -1 means to the end of the context
    int32_t min_tokens = 0;            ///< outputs before EOS or a stop token may appear
    int32_t first_n_token_no_eos = 0;  ///< outputs before EOS may appear
    bool ignore_eos = false;
    int32_t eos_token_id = -1;  ///< -1: none
    std::vector<int32_t> stop_token_ids;
    uint64_t seed = 0;
    float inv_temperature = 1.0f;  ///< 1 / temperature; 0 means greedy
    bool is_ratio = false;         ///< drafts are tested by the ratio of probabilities, not by coupled noise
    float top_p = 1.0f;
    int32_t top_k = -1;
    float min_p = 0.0f;
    float repetition = 1.0f;
    float presence = 0.0f;
    float frequency = 0.0f;
    std::vector<int32_t> bias_tokens;
    std::vector<float> bias_values;
    std::vector<int32_t> allowed_token_ids;  ///< empty: every token
    int32_t num_logprobs = -1;               ///< -1 none, 0 the sampled token's, k the top k as well
    int32_t num_prompt_logprobs = -1;
    std::vector<int32_t> golden_token_ids;  ///< forced output tokens by output index; -1 leaves one free
    bool needs_text = false;                ///< its new tokens are listed in `CommitResult`
    std::vector<ContentKey> content_keys;   ///< part of the prefix hashes of the blocks that they touch
    double arrival_time = -1.0;             ///< monotonic seconds; negative: the moment of `add`
};

/// Log-probabilities kept for one side (prompt or output) of a sequence; entry i belongs to token i of that
/// side.
struct LogprobStore {
    int32_t width = 0;              ///< columns of the top lists
    std::vector<float> values;      // [n] of the token itself
    std::vector<int32_t> ranks;     // [n] 1-based rank of the token
    std::vector<int32_t> top_ids;   // [n, width]
    std::vector<float> top_values;  // [n, width]
};

/// Distinct tokens that penalties look at, with their number of occurrences in the output.
struct TokenHistory {
    std::vector<int32_t> tokens;  // [n] distinct
    std::vector<int32_t> counts;  // [n] occurrences in the output; 0: in the prompt only
    std::unordered_map<int32_t, int32_t> index;

    void mention(int32_t token);  ///< Adds the token with count 0 when it is new.
    void append(int32_t token);   ///< Counts one more output occurrence.
};

struct SequenceMetrics {
    double arrival = 0.0;  ///< monotonic seconds; 0 in the others means "not yet"
    double first_scheduled = 0.0;
    double first_token = 0.0;
    double finish = 0.0;
    int32_t num_preemptions = 0;
    int32_t num_cached_tokens = 0;  ///< prompt tokens whose KV was found instead of computed
    int32_t num_positions = 0;      ///< most drafts per step
    int64_t num_decode_steps = 0;   ///< decode steps that gave it tokens
    int64_t num_decode_tokens = 0;  ///< tokens from these
    int64_t num_drafted = 0;        ///< drafts proposed
    int64_t num_verified = 0;       ///< drafts that had a row
    int64_t num_accepted = 0;       ///< drafts that were accepted
    std::array<int32_t, kMaxDrafts> verified_by_position{};
    std::array<int32_t, kMaxDrafts> accepted_by_position{};
};

/// Confidences of a block of drafts: entry j estimates that draft j stands if those before it do.
struct DraftEstimates {
    std::array<float, kMaxDrafts> confidences{};
    uint8_t size = 0;  ///< 0: nothing is known
};

/// A block of drafts whose outcome is not known to its end yet.
struct FollowedBlock {
    std::array<int32_t, kMaxDrafts> drafts{};
    std::array<float, kMaxDrafts> confidences{};
    uint8_t size = 0;          ///< 0: none
    uint8_t num_accepted = 0;  ///< `size`: it stood, the token behind it is to come
};

/// A sequence that another engine has begun, or that has ended there: everything but the bytes of its blocks
/// and its slot.
struct ComputedSequence {
    std::vector<int32_t> tokens;  // [num_prompt + outputs], at least one output
    int32_t num_prompt = 0;
    std::vector<int32_t> drafts;     // [k] behind the newest token
    std::vector<float> confidences;  // [k]
    LogprobStore output_logprobs;
    LogprobStore prompt_logprobs;
    SequenceMetrics metrics;  ///< its times and counts so far
    FinishReason finish_reason = FinishReason::kNone;  ///< else it has ended, maybe without an output
    ErrorKind error_kind = ErrorKind::kNone;
    int32_t stop_token = -1;
};

/// Hashes of a sequence's tokens, computed when somebody asks.
struct PrefixKeys {
    std::vector<PrefixHash> blocks;  // of the tokens up to the end of each full block
    PrefixHash whole;                ///< of the first `whole_length` tokens
    int32_t whole_length = 0;
};

/// What the prefix cache knows of a sequence's blocks.
struct PublishedPrefix {
    PrefixKeys keys;
    int32_t num_published = 0;  ///< leading blocks that were known once
    int32_t node = 0;           ///< the node of the last of them,
    int64_t serial = 0;         ///< if it still has this serial
};

/// The newest step that scheduled a sequence; meaningful while that step is in flight.
struct LastStep {
    int32_t index = 0;        ///< row of the sequence in the plan
    int32_t num_rows = 0;     ///< query rows
    int32_t num_samples = 0;  ///< rows that may emit a token: 0 for a chunk that does not end the prompt
    int32_t max_samples = 0;  ///< most of them that the device may make it
    bool has_drafts = false;  ///< it proposes drafts at its end
};

struct Sequence {
    int64_t id = 0;
    SequenceStatus status = SequenceStatus::kWaiting;
    FinishReason finish_reason = FinishReason::kNone;
    ErrorKind error_kind = ErrorKind::kNone;
    bool is_evicting = false;   ///< preempted in flight: its blocks go back at the commit
    bool is_released = false;   ///< forgotten by the caller, kept only for the step in flight
    bool is_void = false;       ///< what its steps in flight compute is nonsense; it is evicted as well
    uint8_t num_in_flight = 0;  ///< uncommitted plans that hold it, 0..2
    uint8_t num_drafts = 0;
    bool has_sparse_inputs = false;  ///< penalties, bias, bans or an allowed list
    bool hands_off = false;          ///< ends with `kHandOff` behind its first sampled token
    bool is_computed = false;        ///< waits for blocks and a slot only: somebody outside holds their bytes
    bool wants_swap = false;         ///< preempted: its bytes go to the host when no step uses them any more
    int64_t swap_bytes = 0;          ///< of the host memory that holds it; 0: none
    int32_t num_prompt = 0;
    int32_t num_computed = 0;
    int32_t limit_length = 0;   ///< total tokens at which it ends with kLength
    int32_t state_slot = 0;     ///< 0: none
    int32_t running_index = 0;  ///< its place in `CoreState::running`
    LastStep last;
    std::vector<int32_t> tokens;  // [num_prompt + outputs]
    std::vector<int32_t> blocks;  // block table
    SequenceParams params;
    std::array<int32_t, kMaxDrafts> drafts{};  // [num_drafts] proposed by the last committed step
    DraftEstimates newest_estimates;           ///< of the newest block, `drafts` when there are some
    DraftEstimates previous_estimates;  ///< of the block before; for ratio verification its causal part
    FollowedBlock followed;
    int64_t drafted_at = 0;  ///< the step that proposed the newest block
    SequenceMetrics metrics;
    int32_t stop_token = -1;    ///< the EOS or stop token that ended it
    int32_t kept_outputs = -1;  ///< outputs that count after `stop` cut it short; -1: all
    int32_t num_overtaken = 0;  ///< later requests admitted while this one did not fit
    int32_t num_scored = 0;     ///< prompt log-probabilities received
    int32_t num_lost = 0;       ///< tokens that were computed and forgotten, by a preemption or a failed step
    int32_t fork_border = 0;    ///< where a state is to be kept because another prompt parts from it there
    bool is_offered = false;    ///< a store outside was asked for its prefix
    int32_t publish_at = 0;     ///< computed tokens that complete its next unpublished block
    PublishedPrefix prefix;
    std::unique_ptr<LogprobStore> output_logprobs;
    std::unique_ptr<LogprobStore> prompt_logprobs;
    std::unique_ptr<TokenHistory> history;

    int32_t length() const { return static_cast<int32_t>(tokens.size()); }
    int32_t num_outputs() const { return length() - num_prompt; }
    int32_t num_kept_outputs() const { return kept_outputs >= 0 ? kept_outputs : num_outputs(); }
    int32_t num_blocks() const { return static_cast<int32_t>(blocks.size()); }
    /// Whether prompt log-probabilities are missing.
    bool still_scores() const { return params.num_prompt_logprobs >= 0 && num_scored < num_prompt - 1; }
    /// First position that decoder windows see when bounded replay keeps the newest `keep_tokens` of a prompt
    /// (0: off). It follows from the prompt alone, so recomputing after a preemption repeats the first
    /// prefill. Prompts whose log-probabilities are wanted are never cut.
    int32_t replay_start(int32_t keep_tokens) const {
        const bool is_cut = keep_tokens > 0 && params.num_prompt_logprobs < 0 && num_prompt > keep_tokens;
        return is_cut ? num_prompt - keep_tokens : 0;
    }
    bool is_finished() const { return status == SequenceStatus::kFinished; }
    /// Whether its drafts are tested by the ratio of probabilities; greedy rows are the same in both modes.
    bool is_ratio() const { return params.is_ratio && params.inv_temperature != 0.0f; }

    /// Most tokens it can have once the step in flight (at most one) is committed.
    int32_t next_length() const { return num_in_flight == 0 ? length() : length() + last.num_samples; }
    /// Tokens with KV by then; exact for prefill, the most possible for decode.
    int32_t next_computed() const {
        if (num_in_flight == 0) return num_computed;
        return num_computed + last.num_rows;
    }
    /// True when the step in flight ends it for sure.
    bool ends_in_flight() const {
        return num_in_flight > 0 && last.num_samples > 0 && (hands_off || length() + 1 >= limit_length);
    }

    void append_output(int32_t token);
};

/// Owns every sequence from `add` to `release`; addresses are stable.
class SequencePool {
public:
    Sequence& create();               ///< Ids 1, 2, ...; never reused.
    Sequence& get(int64_t id) const;  ///< Throws `UnknownSequenceError`.
    void erase(int64_t id);           ///< Drops the record.
    const std::unordered_map<int64_t, std::unique_ptr<Sequence>>& all() const { return sequences_; }

private:
    int64_t next_id_ = 1;
    std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;
};

}  // namespace deepinfer
