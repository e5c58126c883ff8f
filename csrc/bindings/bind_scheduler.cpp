/// EngineCore: requests in, schedule, commit.
#include <array>

#include "bindings.hpp"

namespace deepinfer::bindings {
namespace {

/// CommitResult with numpy arrays that own their memory.
struct CommitArrays {
    py::array finished_ids, finished_reasons, num_new_tokens, text_ids, text_offsets, text_tokens;
    py::array first_token_latencies, verified_by_position, accepted_by_position;
    int64_t num_tokens, num_drafted, num_verified, num_accepted;
};

CommitArrays as_arrays(CommitResult&& result) {
    return {to_array(std::move(result.finished_ids)),
            to_array(std::move(result.finished_reasons)),
            to_array(std::move(result.num_new_tokens)),
            to_array(std::move(result.text_ids)),
            to_array(std::move(result.text_offsets)),
            to_array(std::move(result.text_tokens)),
            to_array(std::move(result.first_token_latencies)),
            to_array(std::move(result.verified_by_position)),
            to_array(std::move(result.accepted_by_position)),
            result.num_tokens,
            result.num_drafted,
            result.num_verified,
            result.num_accepted};
}

CommitArrays commit(EngineCore& core, const StepPlan& plan, const py::object& tokens,
                    const py::object& num_emitted, const py::object& logprobs, const py::object& ranks,
                    const py::object& top_ids, const py::object& top_logprobs, const py::object& faults,
                    const py::object& ends, const py::object& drafts, const py::object& confidences) {
    if (tokens.is_none()) throw std::invalid_argument("tokens is missing");
    StepOutcome outcome;
    outcome.tokens = to_span<int32_t>(tokens, "tokens");
    outcome.num_emitted = to_span<int32_t>(num_emitted, "num_emitted");
    outcome.logprobs = to_span<float>(logprobs, "logprobs");
    outcome.ranks = to_span<int32_t>(ranks, "ranks");
    outcome.top_ids = to_span<int32_t>(top_ids, "top_ids", 2);
    outcome.top_logprobs = to_span<float>(top_logprobs, "top_logprobs", 2);
    outcome.top_width = num_columns(top_ids);
    outcome.faults = to_span<uint8_t>(faults, "faults");
    outcome.ends = to_span<uint8_t>(ends, "ends");
    outcome.drafts = to_span<int32_t>(drafts, "drafts", 2);
    outcome.confidences = to_span<float>(confidences, "confidences", 2);
    outcome.draft_width = num_columns(drafts);
    if (num_columns(top_logprobs) != outcome.top_width) {
        throw std::invalid_argument(
            concat("top_ids has ", outcome.top_width, " columns, top_logprobs ", num_columns(top_logprobs)));
    }
    CommitResult result;
    {
        const py::gil_scoped_release unlocked;
        result = core.commit(plan, outcome);
    }
    return as_arrays(std::move(result));
}

void bind_result(py::module_& module) {
    py::class_<CommitArrays>(module, "CommitResult", "What a commit changed; arrays belong to the caller.")
        .def_readonly("finished_ids", &CommitArrays::finished_ids, "int64 [F]")
        .def_readonly("finished_reasons", &CommitArrays::finished_reasons, "uint8 [F] FinishReason values")
        .def_readonly("num_new_tokens", &CommitArrays::num_new_tokens,
                      "int32 [S] tokens appended per plan sequence")
        .def_readonly("text_ids", &CommitArrays::text_ids,
                      "int64 [T] sequences with needs_text and new tokens")
        .def_readonly("text_offsets", &CommitArrays::text_offsets, "int32 [T + 1] into text_tokens")
        .def_readonly("text_tokens", &CommitArrays::text_tokens, "int32")
        .def_readonly("first_token_latencies", &CommitArrays::first_token_latencies,
                      "float64 seconds since arrival")
        .def_readonly("verified_by_position", &CommitArrays::verified_by_position, "int64 [num_draft_tokens]")
        .def_readonly("accepted_by_position", &CommitArrays::accepted_by_position, "int64 [num_draft_tokens]")
        .def_readonly("num_tokens", &CommitArrays::num_tokens, "tokens appended in all")
        .def_readonly("num_drafted", &CommitArrays::num_drafted, "drafts proposed")
        .def_readonly("num_verified", &CommitArrays::num_verified, "drafts that had a row")
        .def_readonly("num_accepted", &CommitArrays::num_accepted);
}

py::list take_published_borders(EngineCore& core) {
    py::list borders;
    for (PublishedBorder& border : core.take_published_borders()) {
        borders.append(py::make_tuple(to_array(std::move(border.tokens)), to_array(std::move(border.blocks)),
                                      border.snapshot, border.is_whole));
    }
    return borders;
}

py::object reserve_prefix(EngineCore& core, int64_t id, int32_t border) {
    const std::optional<PrefixReservation> held = core.reserve_prefix(id, border);
    if (!held) return py::none();
    std::vector<int32_t> missing(held->blocks.begin() + held->num_known, held->blocks.end());
    return py::make_tuple(held->num_known, to_array(std::move(missing)), held->snapshot);
}

template <typename T>
std::vector<T> to_vector(const py::object& object, const char* name, int num_dims = 1) {
    const auto values = to_span<T>(object, name, num_dims);
    return {values.begin(), values.end()};
}

/// (values [n], ranks [n], top ids [n, K], top values [n, K]); None for none.
LogprobStore to_store(const py::object& arrays, const char* name) {
    LogprobStore store;
    if (arrays.is_none()) return store;
    const auto parts = arrays.cast<std::array<py::object, 4>>();
    store.values = to_vector<float>(parts[0], name);
    store.ranks = to_vector<int32_t>(parts[1], name);
    store.top_ids = to_vector<int32_t>(parts[2], name, 2);
    store.top_values = to_vector<float>(parts[3], name, 2);
    return store;
}

int64_t add_computed(EngineCore& core, const SequenceParams& params, const py::object& tokens,
                     int32_t num_prompt, const py::object& drafts, const py::object& confidences,
                     const py::object& logprobs, const py::object& prompt_logprobs, double first_scheduled,
                     double first_token, int32_t num_preemptions, int32_t num_cached_tokens,
                     int64_t num_drafted, FinishReason finish_reason, ErrorKind error_kind,
                     int32_t stop_token) {
    ComputedSequence computed;
    computed.tokens = to_vector<int32_t>(tokens, "tokens");
    computed.num_prompt = num_prompt;
    computed.drafts = to_vector<int32_t>(drafts, "drafts");
    computed.confidences = to_vector<float>(confidences, "confidences");
    computed.output_logprobs = to_store(logprobs, "logprobs");
    computed.prompt_logprobs = to_store(prompt_logprobs, "prompt_logprobs");
    computed.metrics.first_scheduled = first_scheduled;
    computed.metrics.first_token = first_token;
    computed.metrics.num_preemptions = num_preemptions;
    computed.metrics.num_cached_tokens = num_cached_tokens;
    computed.metrics.num_drafted = num_drafted;
    computed.finish_reason = finish_reason;
    computed.error_kind = error_kind;
    computed.stop_token = stop_token;
    return core.add_computed(params, std::move(computed));
}

py::list to_list(std::vector<AdmittedSequence>&& sequences) {
    py::list admitted;
    for (AdmittedSequence& sequence : sequences) {
        admitted.append(py::make_tuple(sequence.id, to_array(std::move(sequence.blocks)), sequence.slot));
    }
    return admitted;
}

py::tuple take_swaps(EngineCore& core) {
    auto [outs, drops] = core.take_swaps();
    py::list copied;
    for (SwapOut& out : outs) {
        copied.append(py::make_tuple(out.id, to_array(std::move(out.blocks)), out.slot, out.num_scores));
    }
    return py::make_tuple(copied, drops);
}

void bind_swap(py::module_& module, EngineClass& engine) {
    py::class_<SwapStats>(module, "SwapStats", "Totals since the start, but for what is held.")
        .def_readonly("num_out", &SwapStats::num_out, "sequences that went to the host")
        .def_readonly("num_in", &SwapStats::num_in, "and came back")
        .def_readonly("num_refused", &SwapStats::num_refused, "recomputed because the pool was full")
        .def_readonly("num_held", &SwapStats::num_held, "there now")
        .def_readonly("held_bytes", &SwapStats::held_bytes);
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    engine
        .def("take_swaps", &take_swaps,
             "([(sequence id, int32 [n] blocks, slot, drafts whose scores count)] to be copied to the host "
             "before anything else takes blocks or is launched, [ids] whose copies nobody needs any more).")
        .def(
            "admit_swapped", [](EngineCore& core) { return to_list(core.admit_swapped()); },
            "As admit_computed, for sequences that were swapped out.")
        .def(
            "keep_swaps",
            [](EngineCore& core, const std::vector<int64_t>& ids) { return core.keep_swaps(ids); },
            py::arg("seq_ids"),
            "Of the swapped sequences only these have whole copies; others are recomputed. [ids] that are "
            "left.")
        .def("set_copy_rate", &EngineCore::set_copy_rate, py::arg("bytes_per_second"), Unlocked(),
             "Of copies between the pools and the host.")
        .def("add_prefill_time", &EngineCore::add_prefill_time, py::arg("plan"), py::arg("ms"), Unlocked(),
             "A prefill step has taken so long; other steps do not count.")
        .def("swap_stats", &EngineCore::swap_stats, Unlocked())
        .def_property_readonly("num_recomputed_rows", &EngineCore::num_recomputed_rows,
                               "prefilled rows of tokens that had been computed before");
}

void bind_prefix_stats(py::module_& module) {
    py::class_<PrefixCacheStats>(module, "PrefixCacheStats", "Totals since the start, but for the two sizes.")
        .def_readonly("num_queries", &PrefixCacheStats::num_queries, "admissions that were looked up")
        .def_readonly("num_hits", &PrefixCacheStats::num_hits, "of these, how many resumed from a snapshot")
        .def_readonly("num_query_tokens", &PrefixCacheStats::num_query_tokens,
                      "tokens of the admissions, forks included")
        .def_readonly("num_hit_tokens", &PrefixCacheStats::num_hit_tokens,
                      "of these, how many were not computed")
        .def_readonly("num_forks", &PrefixCacheStats::num_forks, "admissions as copies of an equal prompt")
        .def_readonly("num_evicted_blocks", &PrefixCacheStats::num_evicted_blocks)
        .def_readonly("num_evicted_snapshots", &PrefixCacheStats::num_evicted_snapshots)
        .def_readonly("num_passed", &PrefixCacheStats::num_passed, "snapshots that decode steps have left")
        .def_readonly("num_blocks", &PrefixCacheStats::num_blocks, "known now")
        .def_readonly("num_snapshots", &PrefixCacheStats::num_snapshots, "kept now");
}

}  // namespace

void bind_scheduler(py::module_& module, EngineClass& engine) {
    bind_result(module);
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    const py::object none = py::none();
    bind_prefix_stats(module);
    bind_swap(module, engine);
    engine.def(py::init<const CoreConfig&>(), py::arg("config"), "ValueError when a limit cannot work.")
        .def(
            "set_compressed_vocab",
            [](EngineCore& core, const py::object& map, int32_t pad_id) {
                const auto ids = to_span<int32_t>(map, "map");
                core.set_compressed_vocab({ids.begin(), ids.end()}, pad_id);
            },
            py::arg("map"), py::arg("pad_id"),
            "Vocabulary of n-gram windows: int32 [vocab] raw id -> compressed id; pad_id is a compressed id.")
        .def(
            "add",
            [](EngineCore& core, const SequenceParams& params, const py::object& prompt) {
                const auto ids = to_span<int32_t>(prompt, "prompt");
                return core.add(params, ids);
            },
            py::arg("params"), py::arg("prompt"),
            "Queues a request: int32 [n] -> sequence id. ValueError when it can never run, saying what would "
            "work.")
        .def("add_computed", &add_computed, py::arg("params"), py::arg("tokens"), py::arg("num_prompt"),
             py::arg("drafts") = none, py::arg("confidences") = none, py::arg("logprobs") = none,
             py::arg("prompt_logprobs") = none, py::arg("first_scheduled") = 0.0,
             py::arg("first_token") = 0.0, py::arg("num_preemptions") = 0, py::arg("num_cached_tokens") = 0,
             py::arg("num_drafted") = 0, py::arg("finish_reason") = FinishReason::kNone,
             py::arg("error_kind") = ErrorKind::kNone, py::arg("stop_token") = -1,
             "Queues a sequence that another engine has begun: int32 [n] prompt and outputs, all but the "
             "newest computed; log-probabilities as (values, ranks, top ids, top values) -> sequence id. "
             "With a finish reason it has ended there, maybe without an output, and is only to be read and "
             "released.")
        .def(
            "admit_computed", [](EngineCore& core) { return to_list(core.admit_computed()); },
            "[(sequence id, int32 [n] blocks, slot)] of such sequences that have been given room: they run "
            "from the next plan on, and the caller fills blocks and slot in front of it.")
        .def("abort", &EngineCore::abort, py::arg("seq_id"), Unlocked(),
             "Ends it now; False when it had ended before.")
        .def("stop", &EngineCore::stop, py::arg("seq_id"), py::arg("num_output_tokens"),
             py::arg("reason") = FinishReason::kStop, Unlocked(),
             "Ends it with its first num_output_tokens outputs, also when it has just ended by itself.")
        .def("fail", &EngineCore::fail, py::arg("seq_id"), py::arg("kind"), Unlocked(),
             "Ends it with FinishReason.ERROR.")
        .def("release", &EngineCore::release, py::arg("seq_id"), Unlocked(),
             "Forgets a finished sequence, and gives back what one that is handed off still holds.")
        .def("preempt", &EngineCore::preempt, py::arg("seq_id"), Unlocked(),
             "Takes its blocks; it will be recomputed. False when it holds none.")
        .def("wants_prefill", &EngineCore::wants_prefill, Unlocked(),
             "Whether the next step should be a prefill.")
        .def("schedule", &EngineCore::schedule, py::arg("kind") = std::nullopt, Unlocked(),
             "Plans one step; None when nothing can run before a commit or a new request.")
        .def(
            "take_ended",
            [](EngineCore& core) {
                auto [ids, reasons] = core.take_ended();
                return py::make_tuple(to_array(std::move(ids)), to_array(std::move(reasons)));
            },
            "(int64 [n] ids, uint8 [n] reasons) of the sequences that schedule() has ended.")
        .def("commit", &commit, py::arg("plan"), py::arg("tokens"), py::arg("num_emitted") = none,
             py::arg("logprobs") = none, py::arg("ranks") = none, py::arg("top_ids") = none,
             py::arg("top_logprobs") = none, py::arg("faults") = none, py::arg("ends") = none,
             py::arg("drafts") = none, py::arg("confidences") = none,
             "Applies the results of the oldest plan in flight: tokens int32 [R], num_emitted int32 [S], "
             "logprobs float32 [R], ranks int32 [R], top_ids int32 [R, K], top_logprobs float32 [R, K], "
             "faults uint8 [R], ends uint8 [R] (1: the row's token ends its sequence), drafts int32 [S, k], "
             "confidences float32 [S, k].")
        .def("discard_in_flight", &EngineCore::discard_in_flight, Unlocked(),
             "Forgets all plans in flight; their sequences are recomputed. Returns the number of plans.")
        .def("reset_prefix_cache", &EngineCore::reset_prefix_cache, Unlocked(),
             "Forgets every prefix; False, and nothing changes, while a sequence is unfinished or in flight.")
        .def("prefix_cache_stats", &EngineCore::prefix_cache_stats, Unlocked())
        .def("start_reporting_prefixes", &EngineCore::start_reporting_prefixes, Unlocked(),
             "From now on take_published_borders() has something to give.")
        .def(
            "take_published_borders", &take_published_borders,
            "[(int32 [border] tokens, int32 [n] blocks, snapshot slot, whether its decoder windows are "
            "whole)] of borders whose state has become known since the last call; their bytes stay until the "
            "next plan.")
        .def(
            "take_arrivals", [](EngineCore& core) { return core.take_arrivals(); },
            "Waiting sequences that could be admitted now, each named once.")
        .def(
            "find_prefix",
            [](EngineCore& core, int64_t id) {
                const KnownPrefix known = core.find_prefix(id);
                return py::make_tuple(known.num_tokens, known.num_known, known.replay_start);
            },
            py::arg("seq_id"),
            "(tokens to resume from, tokens in known blocks, first position of its decoder windows) of a "
            "waiting sequence.")
        .def("reserve_prefix", &reserve_prefix, py::arg("seq_id"), py::arg("border"),
             "Holds blocks and a slot for the first `border` tokens of a waiting sequence: (known blocks, "
             "int32 [n] blocks to fill behind them, slot to fill), None when that cannot be.")
        .def("publish_prefix", &EngineCore::publish_prefix, Unlocked(),
             "What is reserved is known from now on, and is filled in front of the next step. A number for "
             "settle_prefix(); 0 when the sequence is gone.")
        .def("settle_prefix", &EngineCore::settle_prefix, py::arg("publication"), py::arg("is_sound"),
             Unlocked(),
             "A published prefix is filled; or it is not sound, and sequences that have read it start again. "
             "Call before the commit of the step that reads it.")
        .def("cancel_prefix", &EngineCore::cancel_prefix, Unlocked(),
             "Gives back what is reserved, if anything is.")
        .def("check_integrity", &EngineCore::check_integrity, Unlocked(),
             "RuntimeError names the first broken invariant.")
        .def("attention_flops", &EngineCore::attention_flops, py::arg("begin"), py::arg("end"),
             "Estimated attention work of the queries at positions [begin, end).")
        .def_property_readonly("num_running", [](EngineCore& core) { return core.counts().num_running; })
        .def_property_readonly("num_waiting", [](EngineCore& core) { return core.counts().num_waiting; })
        .def_property_readonly("num_unfinished",
                               [](EngineCore& core) {
                                   const CoreCounts counts = core.counts();
                                   return counts.num_running + counts.num_waiting;
                               })
        .def_property_readonly("has_unfinished",
                               [](EngineCore& core) {
                                   const CoreCounts counts = core.counts();
                                   return counts.num_running + counts.num_waiting > 0;
                               })
        .def_property_readonly("num_free_blocks",
                               [](EngineCore& core) { return core.counts().num_free_blocks; })
        .def_property_readonly("num_free_slots",
                               [](EngineCore& core) { return core.counts().num_free_slots; })
        .def_property_readonly("num_in_flight", [](EngineCore& core) { return core.counts().num_in_flight; })
        .def_property_readonly("num_preemptions",
                               [](EngineCore& core) { return core.counts().num_preemptions; })
        .def(
            "free_blocks", [](EngineCore& core) { return to_array(core.free_blocks()); },
            "int32 [n], next one first")
        .def(
            "free_slots", [](EngineCore& core) { return to_array(core.free_slots()); },
            "int32 [n], next one first");
}

}  // namespace deepinfer::bindings
