#include "intake.hpp"

#include <algorithm>

#include "check.hpp"
#include "core_state.hpp"

namespace deepinfer {
namespace {

int32_t limit_length(const CoreConfig& config, const SequenceParams& params, int32_t prompt_length) {
    if (params.max_tokens < 0) return config.max_model_len;
    return static_cast<int32_t>(
        std::min<int64_t>(int64_t{prompt_length} + params.max_tokens, config.max_model_len));
}

void check_prompt(const CoreConfig& config, std::span<const int32_t> prompt, int32_t num_ids) {
    if (prompt.empty()) throw std::invalid_argument("the prompt is empty; it needs at least one token");
    if (prompt.size() >= static_cast<size_t>(config.max_model_len)) {
        throw std::invalid_argument(
            concat("the prompt has ", prompt.size(), " tokens and one must be generated, max_model_len is ",
                   config.max_model_len, "; at most ", config.max_model_len - 1, " would work"));
    }
    for (size_t i = 0; i < prompt.size(); ++i) {
        const int32_t id = prompt[i];
        if (config.is_image_token(id)) continue;
        if (id < 0 || (num_ids > 0 && id >= num_ids)) {
            throw std::invalid_argument(concat("prompt token ", i, " is ", id, "; ids must be in 0..",
                                               num_ids > 0 ? num_ids - 1 : INT32_MAX));
        }
    }
}

void check_content(std::span<const ContentKey> keys, size_t num_prompt) {
    for (const ContentKey& key : keys) {
        const int64_t end = int64_t{key.first_token} + key.num_tokens;
        if (key.first_token < 0 || key.num_tokens < 1 || end > static_cast<int64_t>(num_prompt)) {
            throw std::invalid_argument(concat("a content key covers tokens ", key.first_token, "..", end - 1,
                                               " of a prompt of ", num_prompt));
        }
        if (key.key.empty()) throw std::invalid_argument("a content key is empty; it needs a byte at least");
    }
}

void check_params(const SequenceParams& params) {
    if (params.max_tokens == 0 || params.max_tokens < -1) {
        throw std::invalid_argument(
            concat("max_tokens=", params.max_tokens, " must be >= 1, or -1 for no limit"));
    }
    if (params.bias_tokens.size() != params.bias_values.size()) {
        throw std::invalid_argument(concat("bias_tokens has ", params.bias_tokens.size(),
                                           " elements, bias_values ", params.bias_values.size()));
    }
    if (params.num_logprobs < -1 || params.num_prompt_logprobs < -1) {
        throw std::invalid_argument(concat("num_logprobs=", params.num_logprobs, " and num_prompt_logprobs=",
                                           params.num_prompt_logprobs, " must be >= -1"));
    }
}

std::unique_ptr<LogprobStore> make_store(int32_t num_logprobs) {
    if (num_logprobs < 0) return nullptr;
    auto store = std::make_unique<LogprobStore>();
    store->width = num_logprobs;
    return store;
}

}  // namespace

void check_request(const CoreConfig& config, const SequenceParams& params, std::span<const int32_t> prompt,
                   int32_t num_ids) {
    check_prompt(config, prompt, num_ids);
    check_params(params);
    check_content(params.content_keys, prompt.size());
    const int32_t num_prompt = static_cast<int32_t>(prompt.size());
    // The last token is never read, so it needs no place.
    const int32_t longest = limit_length(config, params, num_prompt) - 1;
    const int32_t usable = config.num_blocks - 1;
    if (config.blocks_for(longest) > usable) {
        const int64_t capacity = int64_t{usable} * config.block_size;
        const int64_t works = capacity + 1 - num_prompt;
        throw std::invalid_argument(concat(
            "a prompt of ", num_prompt, " tokens with up to ", longest + 1 - num_prompt, " outputs needs ",
            config.blocks_for(longest), " blocks of ", config.block_size, " tokens, the pool has ", usable,
            "; ",
            works > 0 ? concat("max_tokens <= ", works) : concat("a prompt of at most ", capacity, " tokens"),
            " or num_blocks >= ", config.blocks_for(longest) + 1, " would work"));
    }
}

void prepare_sequence(const CoreConfig& config, SequenceParams params, std::span<const int32_t> prompt,
                      Sequence& sequence) {
    sequence.num_prompt = static_cast<int32_t>(prompt.size());
    sequence.limit_length = limit_length(config, params, sequence.num_prompt);
    sequence.hands_off = config.role == Role::kPrompt;
    sequence.tokens.reserve(prompt.size() +
                            static_cast<size_t>(std::min(sequence.limit_length - sequence.num_prompt, 1024)));
    sequence.tokens.assign(prompt.begin(), prompt.end());
    sequence.metrics.num_positions = config.num_draft_tokens;
    sequence.metrics.arrival = params.arrival_time >= 0.0 ? params.arrival_time : monotonic_seconds();
    sequence.output_logprobs = make_store(params.num_logprobs);
    sequence.prompt_logprobs = make_store(params.num_prompt_logprobs);
    if (params.repetition != 1.0f || params.presence != 0.0f || params.frequency != 0.0f) {
        sequence.history = std::make_unique<TokenHistory>();
        // Presence and frequency look at outputs only.
        if (params.repetition != 1.0f) {
            for (int32_t token : prompt) {
                if (!config.is_image_token(token)) sequence.history->mention(token);
            }
        }
    }
    sequence.has_sparse_inputs = sequence.history != nullptr || !params.bias_tokens.empty() ||
                                 !params.allowed_token_ids.empty() || params.min_tokens > 0 ||
                                 params.first_n_token_no_eos > 0;
    sequence.params = std::move(params);
}

void check_computed(const CoreConfig& config, const SequenceParams& params, const ComputedSequence& computed,
                    int32_t num_ids) {
    const int32_t length = static_cast<int32_t>(computed.tokens.size());
    const int32_t num_prompt = computed.num_prompt;
    const bool has_ended = computed.finish_reason != FinishReason::kNone;
    if (num_prompt < 1 || num_prompt > length || (num_prompt == length && !has_ended)) {
        throw std::invalid_argument(
            concat("num_prompt=", num_prompt, " of ", length, " tokens; a prompt and an output are needed"));
    }
    check_request(config, params, std::span(computed.tokens).first(num_prompt), num_ids);
    if (!has_ended && length >= limit_length(config, params, num_prompt)) {
        throw std::invalid_argument(concat("it has ", length, " tokens and ends at ",
                                           limit_length(config, params, num_prompt), ": nothing is left"));
    }
    const auto check_ids = [&](const char* name, std::span<const int32_t> ids) {
        for (const int32_t id : ids) {
            if (id < 0 || (num_ids > 0 && id >= num_ids))
                throw std::invalid_argument(concat(name, " hold ", id, ", the vocabulary has ", num_ids));
        }
    };
    check_ids("outputs", std::span(computed.tokens).subspan(num_prompt));
    check_ids("drafts", computed.drafts);
    if (computed.drafts.size() > static_cast<size_t>(config.num_draft_tokens)) {
        throw std::invalid_argument(concat("it has ", computed.drafts.size(),
                                           " drafts, num_draft_tokens is ", config.num_draft_tokens));
    }
    const auto check_size = [](const char* name, size_t size, size_t expected) {
        if (size != expected)
            throw std::invalid_argument(concat(name, " has ", size, " elements instead of ", expected));
    };
    check_size("confidences", computed.confidences.size(), computed.drafts.size());
    const auto check_store = [&](const char* name, const LogprobStore& store, int32_t wanted, int32_t rows) {
        const size_t count = wanted < 0 ? 0 : static_cast<size_t>(rows);
        const size_t top = count * static_cast<size_t>(std::max(wanted, 0));
        check_size(name, store.values.size(), count);
        check_size(name, store.ranks.size(), count);
        check_size(name, store.top_ids.size(), top);
        check_size(name, store.top_values.size(), top);
    };
    check_store("logprobs", computed.output_logprobs, params.num_logprobs, length - num_prompt);
    // One that was aborted may have scored its prompt in part.
    const int32_t num_scored =
        has_ended ? static_cast<int32_t>(computed.prompt_logprobs.values.size()) : num_prompt - 1;
    check_store("prompt_logprobs", computed.prompt_logprobs, params.num_prompt_logprobs, num_scored);
}

void prepare_computed(const CoreConfig& config, SequenceParams params, ComputedSequence&& computed,
                      Sequence& sequence) {
    const std::span<const int32_t> tokens = computed.tokens;
    const int32_t num_prompt = computed.num_prompt;
    prepare_sequence(config, std::move(params), tokens.first(num_prompt), sequence);
    for (const int32_t token : tokens.subspan(num_prompt)) sequence.append_output(token);
    const double arrival = sequence.metrics.arrival;
    sequence.metrics = computed.metrics;
    sequence.metrics.arrival = arrival;
    sequence.metrics.num_positions = config.num_draft_tokens;
    const auto fill = [](std::unique_ptr<LogprobStore>& store, LogprobStore&& values) {
        if (!store) return;
        values.width = store->width;
        *store = std::move(values);
    };
    fill(sequence.output_logprobs, std::move(computed.output_logprobs));
    fill(sequence.prompt_logprobs, std::move(computed.prompt_logprobs));
    if (sequence.prompt_logprobs)
        sequence.num_scored = static_cast<int32_t>(sequence.prompt_logprobs->values.size());
    sequence.num_drafts = static_cast<uint8_t>(computed.drafts.size());
    sequence.newest_estimates.size = sequence.num_drafts;
    std::copy(computed.drafts.begin(), computed.drafts.end(), sequence.drafts.begin());
    std::copy(computed.confidences.begin(), computed.confidences.end(),
              sequence.newest_estimates.confidences.begin());
    sequence.is_computed = computed.finish_reason == FinishReason::kNone;
    if (sequence.is_computed) return;
    sequence.status = SequenceStatus::kFinished;
    sequence.finish_reason = computed.finish_reason;
    sequence.error_kind = computed.error_kind;
    sequence.stop_token = computed.stop_token;
    sequence.metrics.finish = monotonic_seconds();
}

}  // namespace deepinfer
