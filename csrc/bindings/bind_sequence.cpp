/// What a caller reads of one sequence; every array is a copy.
#include "bindings.hpp"

namespace deepinfer::bindings {
namespace {

/// Copies the first `count` rows of a store; nothing when it was not asked for.
LogprobStore copy_store(const LogprobStore* store, int32_t count) {
    LogprobStore copy;
    if (store == nullptr) return copy;
    copy = *store;
    const size_t rows = std::min(copy.values.size(), static_cast<size_t>(count));
    copy.values.resize(rows);
    copy.ranks.resize(rows);
    copy.top_ids.resize(rows * copy.width);
    copy.top_values.resize(rows * copy.width);
    return copy;
}

LogprobStore output_store(EngineCore& core, int64_t id) {
    return core.read(id, [](const Sequence& sequence) {
        return copy_store(sequence.output_logprobs.get(), sequence.num_kept_outputs());
    });
}

LogprobStore prompt_store(EngineCore& core, int64_t id) {
    return core.read(id, [](const Sequence& sequence) {
        return copy_store(sequence.prompt_logprobs.get(), sequence.num_scored);
    });
}

py::tuple top_arrays(LogprobStore&& store) {
    const auto rows = static_cast<py::ssize_t>(store.values.size());
    const py::ssize_t width = store.width;
    return py::make_tuple(to_array(std::move(store.top_ids), {rows, width}),
                          to_array(std::move(store.top_values), {rows, width}));
}

/// Defines a method that returns one value of a sequence.
template <typename Getter>
auto value_of(const Getter& get) {
    return [get](EngineCore& core, int64_t id) { return core.read(id, get); };
}

/// Defines a method that returns an array of a sequence.
template <typename Getter>
auto array_of(const Getter& get) {
    return [get](EngineCore& core, int64_t id) { return to_array(core.read(id, get)); };
}

}  // namespace

void bind_sequence(py::module_& module, EngineClass& engine) {
    const auto by_position = [](auto member) {
        return [member](const SequenceMetrics& metrics) {
            const auto& counts = metrics.*member;
            return to_array(std::vector<int32_t>(counts.begin(), counts.begin() + metrics.num_positions));
        };
    };
    py::class_<SequenceMetrics>(module, "SequenceMetrics", "Monotonic seconds; 0.0 means not yet.")
        .def_readonly("arrival", &SequenceMetrics::arrival)
        .def_readonly("first_scheduled", &SequenceMetrics::first_scheduled)
        .def_readonly("first_token", &SequenceMetrics::first_token)
        .def_readonly("finish", &SequenceMetrics::finish)
        .def_readonly("num_preemptions", &SequenceMetrics::num_preemptions)
        .def_readonly("num_cached_tokens", &SequenceMetrics::num_cached_tokens)
        .def_readonly("num_decode_steps", &SequenceMetrics::num_decode_steps,
                      "decode steps that gave it tokens")
        .def_readonly("num_decode_tokens", &SequenceMetrics::num_decode_tokens, "tokens from these")
        .def_readonly("num_drafted", &SequenceMetrics::num_drafted, "drafts proposed")
        .def_readonly("num_verified", &SequenceMetrics::num_verified, "drafts that had a row")
        .def_readonly("num_accepted", &SequenceMetrics::num_accepted)
        .def_property_readonly("verified_by_position", by_position(&SequenceMetrics::verified_by_position),
                               "int32 [num_draft_tokens]")
        .def_property_readonly("accepted_by_position", by_position(&SequenceMetrics::accepted_by_position),
                               "int32 [num_draft_tokens]");
    const py::arg id("seq_id");
    engine
        .def("prompt_token_ids", array_of([](const Sequence& sequence) {
                 return std::vector<int32_t>(sequence.tokens.begin(),
                                             sequence.tokens.begin() + sequence.num_prompt);
             }),
             id, "int32 [prompt]")
        .def("output_token_ids", array_of([](const Sequence& sequence) {
                 const auto begin = sequence.tokens.begin() + sequence.num_prompt;
                 return std::vector<int32_t>(begin, begin + sequence.num_kept_outputs());
             }),
             id, "int32 [outputs]")
        .def("num_prompt_tokens", value_of([](const Sequence& sequence) { return sequence.num_prompt; }), id)
        .def("num_output_tokens",
             value_of([](const Sequence& sequence) { return sequence.num_kept_outputs(); }), id)
        .def("num_computed_tokens", value_of([](const Sequence& sequence) { return sequence.num_computed; }),
             id, "tokens whose KV is in the caches")
        .def("status", value_of([](const Sequence& sequence) { return sequence.status; }), id)
        .def("finish_reason", value_of([](const Sequence& sequence) { return sequence.finish_reason; }), id)
        .def("error_kind", value_of([](const Sequence& sequence) { return sequence.error_kind; }), id)
        .def("stop_token", value_of([](const Sequence& sequence) { return sequence.stop_token; }), id,
             "the EOS or stop token that ended it, -1: none")
        .def("state_slot", value_of([](const Sequence& sequence) { return sequence.state_slot; }), id,
             "0: none")
        .def("block_table",
             array_of([](const Sequence& sequence) { return std::vector<int32_t>(sequence.blocks); }), id,
             "int32 [n]")
        .def("drafts", array_of([](const Sequence& sequence) {
                 return std::vector<int32_t>(sequence.drafts.begin(),
                                             sequence.drafts.begin() + sequence.num_drafts);
             }),
             id, "int32 [n] proposed by the last committed step")
        .def("confidences", array_of([](const Sequence& sequence) {
                 const auto begin = sequence.newest_estimates.confidences.begin();
                 return std::vector<float>(begin, begin + sequence.num_drafts);
             }),
             id, "float32 [n] of the drafts")
        .def("metrics", value_of([](const Sequence& sequence) { return sequence.metrics; }), id)
        .def(
            "logprobs", [](EngineCore& core, int64_t id) { return to_array(output_store(core, id).values); },
            id, "float32 [outputs] of each output token; empty when not asked for")
        .def(
            "ranks", [](EngineCore& core, int64_t id) { return to_array(output_store(core, id).ranks); }, id,
            "int32 [outputs] 1-based rank of each output token")
        .def(
            "top_logprobs", [](EngineCore& core, int64_t id) { return top_arrays(output_store(core, id)); },
            id, "(int32 [outputs, K], float32 [outputs, K])")
        .def(
            "prompt_logprobs",
            [](EngineCore& core, int64_t id) { return to_array(prompt_store(core, id).values); }, id,
            "float32 [prompt - 1] of prompt tokens 1, 2, ...; shorter while the prompt is not done")
        .def(
            "prompt_ranks",
            [](EngineCore& core, int64_t id) { return to_array(prompt_store(core, id).ranks); }, id,
            "int32 [prompt - 1]")
        .def(
            "prompt_top_logprobs",
            [](EngineCore& core, int64_t id) { return top_arrays(prompt_store(core, id)); }, id,
            "(int32 [prompt - 1, K], float32 [prompt - 1, K])");
}

}  // namespace deepinfer::bindings
