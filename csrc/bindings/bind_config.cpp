/// Enums, CoreConfig and SequenceParams.
#include "bindings.hpp"

namespace deepinfer::bindings {
namespace {

/// Keyword constructor of a plain record: every keyword must be a field.
template <typename Record>
std::unique_ptr<Record> from_keywords(const py::kwargs& fields) {
    auto record = std::make_unique<Record>();
    py::object view = py::cast(record.get(), py::return_value_policy::reference);
    for (const auto& [name, value] : fields) {
        if (!py::hasattr(view, name)) {
            throw py::type_error(
                concat(py::str(py::type::of(view).attr("__name__")).template cast<std::string>(),
                       " has no field '", py::str(name).template cast<std::string>(), "'"));
        }
        py::setattr(view, name, value);
    }
    return record;
}

using Terms = std::vector<std::tuple<double, int64_t, int64_t, int64_t>>;

Terms get_terms(const CoreConfig& config) {
    Terms terms;
    for (const AttentionTerm& term : config.attention_terms) {
        terms.emplace_back(term.flops, term.divisor, term.offset, term.cap);
    }
    return terms;
}

void set_terms(CoreConfig& config, const Terms& terms) {
    config.attention_terms.clear();
    for (const auto& [flops, divisor, offset, cap] : terms)
        config.attention_terms.push_back({flops, divisor, offset, cap});
}

using ContentKeys = std::vector<std::tuple<int32_t, int32_t, py::bytes>>;

ContentKeys get_content_keys(const SequenceParams& params) {
    ContentKeys keys;
    for (const ContentKey& key : params.content_keys)
        keys.emplace_back(key.first_token, key.num_tokens, py::bytes(key.key));
    return keys;
}

void set_content_keys(SequenceParams& params, const ContentKeys& keys) {
    params.content_keys.clear();
    for (const auto& [first_token, num_tokens, key] : keys)
        params.content_keys.push_back({first_token, num_tokens, std::string(key)});
}

void bind_enums(py::module_& module) {
    py::enum_<Role>(module, "Role", "Which phases an engine runs.")
        .value("NORMAL", Role::kNormal)
        .value("PROMPT", Role::kPrompt)
        .value("COMPLETION", Role::kCompletion);
    py::enum_<PreemptionMode>(module, "PreemptionMode", "What becomes of the bytes of a preempted sequence.")
        .value("RECOMPUTE", PreemptionMode::kRecompute)
        .value("SWAP", PreemptionMode::kSwap)
        .value("AUTO", PreemptionMode::kAuto);
    py::enum_<StepKind>(module, "StepKind", "A step is entirely one or entirely the other.")
        .value("DECODE", StepKind::kDecode)
        .value("PREFILL", StepKind::kPrefill);
    py::enum_<SequenceStatus>(module, "SequenceStatus")
        .value("WAITING", SequenceStatus::kWaiting)
        .value("RUNNING", SequenceStatus::kRunning)
        .value("FINISHED", SequenceStatus::kFinished);
    py::enum_<FinishReason>(module, "FinishReason")
        .value("NONE", FinishReason::kNone)
        .value("STOP", FinishReason::kStop)
        .value("LENGTH", FinishReason::kLength)
        .value("ABORT", FinishReason::kAbort)
        .value("ERROR", FinishReason::kError)
        .value("HAND_OFF", FinishReason::kHandOff);
    py::enum_<ErrorKind>(
        module, "ErrorKind",
        "Why a sequence ended with FinishReason.ERROR; rows of `faults` hold the same values.")
        .value("NONE", ErrorKind::kNone)
        .value("NUMERICS", ErrorKind::kNumerics)
        .value("MASKED", ErrorKind::kMasked)
        .value("GRAMMAR", ErrorKind::kGrammar)
        .value("IMAGE", ErrorKind::kImage)
        .value("PREEMPTED", ErrorKind::kPreempted)
        .value("INTERNAL", ErrorKind::kInternal);
}

}  // namespace

void bind_config(py::module_& module) {
    bind_enums(module);
    module.attr("MAX_DRAFTS") = kMaxDrafts;
    py::class_<CoreConfig>(module, "CoreConfig", "Limits of the scheduler; checked by EngineCore(config).")
        .def(py::init(&from_keywords<CoreConfig>))
        .def_readwrite("role", &CoreConfig::role)
        .def_readwrite("max_num_seqs", &CoreConfig::max_num_seqs, "sequences that hold a state slot at once")
        .def_readwrite("max_num_batched_tokens", &CoreConfig::max_num_batched_tokens, "query rows of a step")
        .def_readwrite("max_model_len", &CoreConfig::max_model_len, "prompt + output tokens, inclusive")
        .def_readwrite("vocab_size", &CoreConfig::vocab_size,
                       "token ids are checked against it; 0 checks nothing")
        .def_readwrite("block_size", &CoreConfig::block_size, "tokens per block")
        .def_readwrite("num_blocks", &CoreConfig::num_blocks, "pool size, reserved block 0 included")
        .def_readwrite("num_state_slots", &CoreConfig::num_state_slots, "pool size, reserved slot 0 included")
        .def_readwrite("chunked_prefill", &CoreConfig::chunked_prefill)
        .def_readwrite("min_prefill_chunk", &CoreConfig::min_prefill_chunk,
                       "a shorter partial chunk only opens an otherwise empty step")
        .def_readwrite("max_sum_seqlen_k", &CoreConfig::max_sum_seqlen_k,
                       "sum of total lengths in a prefill step")
        .def_readwrite("max_prefill_tflops", &CoreConfig::max_prefill_tflops,
                       "estimated attention work of a prefill step in TFLOP; 0 means no limit")
        .def_property("attention_terms", &get_terms, &set_terms,
                      "list of (flops, divisor, offset, cap): a query with t visible tokens costs the sum of "
                      "flops * min((t + offset) // divisor, cap)")
        .def_readwrite("flops_per_token", &CoreConfig::flops_per_token, "work of a row at any position, > 0")
        .def_readwrite("prefill_attempt_interval", &CoreConfig::prefill_attempt_interval,
                       "decode steps between prefill steps while something decodes")
        .def_readwrite("max_overtakes", &CoreConfig::max_overtakes,
                       "later requests that may be admitted before one that does not fit")
        .def_readwrite("admission_headroom_tokens", &CoreConfig::admission_headroom_tokens,
                       "growth of running sequences that an admission leaves room for")
        .def_readwrite("max_preemptions", &CoreConfig::max_preemptions,
                       "after so many preemptions a sequence is served first and spared")
        .def_readwrite("stop_preempted_request", &CoreConfig::stop_preempted_request,
                       "preemption ends the request instead of recomputing it")
        .def_readwrite("preemption_mode", &CoreConfig::preemption_mode)
        .def_readwrite("swap_limit_bytes", &CoreConfig::swap_limit_bytes,
                       "host memory for the bytes of preempted sequences")
        .def_readwrite("block_bytes", &CoreConfig::block_bytes)
        .def_readwrite("slot_bytes", &CoreConfig::slot_bytes)
        .def_readwrite("draft_score_bytes", &CoreConfig::draft_score_bytes,
                       "of the scores of one draft that is tested by ratio")
        .def_readwrite("num_draft_tokens", &CoreConfig::num_draft_tokens,
                       "most drafts verified per sequence and step")
        .def_readwrite("use_draft_budget", &CoreConfig::use_draft_budget,
                       "choose how many drafts to verify by confidence and step time; else all")
        .def_readwrite("draft_budget_min_gain", &CoreConfig::draft_budget_min_gain,
                       "all drafts are verified unless choosing gains this share of the throughput")
        .def_readwrite("async_scheduling", &CoreConfig::async_scheduling,
                       "one plan may be in flight while the next is scheduled")
        .def_readwrite("prefix_caching", &CoreConfig::prefix_caching,
                       "reuse blocks and states of equal prefixes")
        .def_readwrite("prefix_state_interval", &CoreConfig::prefix_state_interval,
                       "tokens between states kept of a prompt; 0: at its last border only")
        .def_readwrite("prefix_salt", &CoreConfig::prefix_salt, "uint64, part of every prefix hash")
        .def_readwrite("prefix_hash_bits", &CoreConfig::prefix_hash_bits,
                       "fewer than 128 make hashes collide, which tests want")
        .def_readwrite("max_ngram", &CoreConfig::max_ngram, "columns of ngram_ids")
        .def_readwrite("image_token_begin", &CoreConfig::image_token_begin,
                       "ids [begin, end) are image tokens")
        .def_readwrite("image_token_end", &CoreConfig::image_token_end)
        .def_readwrite("replay_keep_tokens", &CoreConfig::replay_keep_tokens,
                       "bounded replay: newest tokens of a prompt that decoder windows begin with; 0: all");
    py::class_<SequenceParams>(module, "SequenceParams", "What a caller asks of one sequence.")
        .def(py::init(&from_keywords<SequenceParams>))
        .def_readwrite("max_tokens", &SequenceParams::max_tokens,
                       "most output tokens; -1: to the end of the context")
        .def_readwrite("min_tokens", &SequenceParams::min_tokens,
                       "outputs before EOS or a stop token may appear")
        .def_readwrite("first_n_token_no_eos", &SequenceParams::first_n_token_no_eos,
                       "outputs before EOS may appear")
        .def_readwrite("ignore_eos", &SequenceParams::ignore_eos)
        .def_readwrite("eos_token_id", &SequenceParams::eos_token_id, "-1: none")
        .def_readwrite("stop_token_ids", &SequenceParams::stop_token_ids)
        .def_readwrite("seed", &SequenceParams::seed, "uint64")
        .def_readwrite("inv_temperature", &SequenceParams::inv_temperature, "1 / temperature; 0 means greedy")
        .def_readwrite("is_ratio", &SequenceParams::is_ratio,
                       "drafts are tested by the ratio of probabilities; no meaning for a greedy request")
        .def_readwrite("top_p", &SequenceParams::top_p, "1: off")
        .def_readwrite("top_k", &SequenceParams::top_k, "-1: off")
        .def_readwrite("min_p", &SequenceParams::min_p, "0: off")
        .def_readwrite("repetition", &SequenceParams::repetition, "1: off")
        .def_readwrite("presence", &SequenceParams::presence, "0: off")
        .def_readwrite("frequency", &SequenceParams::frequency, "0: off")
        .def_readwrite("bias_tokens", &SequenceParams::bias_tokens)
        .def_readwrite("bias_values", &SequenceParams::bias_values)
        .def_readwrite("allowed_token_ids", &SequenceParams::allowed_token_ids, "empty: every token")
        .def_readwrite("num_logprobs", &SequenceParams::num_logprobs,
                       "-1 none, 0 the sampled token's, k the top k too")
        .def_readwrite("num_prompt_logprobs", &SequenceParams::num_prompt_logprobs, "as num_logprobs")
        .def_readwrite("golden_token_ids", &SequenceParams::golden_token_ids,
                       "forced outputs by index; -1 is free")
        .def_readwrite("needs_text", &SequenceParams::needs_text, "list its new tokens in CommitResult")
        .def_property("content_keys", &get_content_keys, &set_content_keys,
                      "[(first_token, num_tokens, bytes)] of the prompt: whoever computes blocks that they "
                      "touch shares them only under equal keys")
        .def_property(
            "arrival_time",
            [](const SequenceParams& params) {
                return params.arrival_time < 0.0 ? std::nullopt : std::optional(params.arrival_time);
            },
            [](SequenceParams& params, std::optional<double> time) {
                params.arrival_time = time.value_or(-1.0);
            },
            "monotonic seconds; None: the moment of EngineCore.add");
}

}  // namespace deepinfer::bindings
