/// StepPlan, layouts and the two input builders.
#include "bindings.hpp"

namespace deepinfer::bindings {
namespace {

using PlanPointer = std::shared_ptr<StepPlan>;

/// One value per sequence of a plan.
template <typename Getter>
auto per_sequence(const StepPlan& plan, const Getter& get) {
    std::vector<decltype(get(plan.sequences.front()))> values;
    values.reserve(plan.sequences.size());
    for (const PlanSequence& entry : plan.sequences) values.push_back(get(entry));
    return to_array(std::move(values));
}

py::array_t<int32_t> copies_of(const std::vector<Copy>& copies) {
    std::vector<int32_t> values;
    values.reserve(2 * copies.size());
    for (const Copy& copy : copies) values.insert(values.end(), {copy.source, copy.target});
    const auto size = static_cast<py::ssize_t>(copies.size());
    return to_array(std::move(values), {size, 2});
}

const char* dtype_name(DataType dtype) {
    switch (dtype) {
        case DataType::kInt32:
            return "int32";
        case DataType::kInt64:
            return "int64";
        case DataType::kFloat32:
            return "float32";
    }
    throw InternalError("unknown data type");
}

py::list entries_of(const Layout& layout, int64_t first_byte) {
    py::list entries;
    for (const LayoutEntry& entry : layout.entries) {
        py::tuple shape = py::make_tuple(entry.rows);
        if (entry.columns >= 0) shape = py::make_tuple(entry.rows, entry.columns);
        entries.append(py::make_tuple(entry.name, dtype_name(entry.dtype), shape, first_byte + entry.offset));
    }
    return entries;
}

/// A layout as Python sees it.
struct LayoutTable {
    py::list entries;  // (name, dtype, shape, byte offset)
    int64_t num_bytes;
};

LayoutTable as_table(const Layout& layout) { return {entries_of(layout, 0), layout.num_bytes}; }

LayoutTable join(const Layout& first, const Layout& second) {
    py::list entries = entries_of(first, 0);
    for (const py::handle entry : entries_of(second, first.num_bytes)) entries.append(entry);
    return {entries, first.num_bytes + second.num_bytes};
}

std::span<std::byte> writable_bytes(py::array_t<uint8_t, py::array::c_style>& buffer) {
    if (buffer.ndim() != 1) throw std::invalid_argument("the buffer must be a one-dimensional uint8 array");
    return {reinterpret_cast<std::byte*>(buffer.mutable_data()), static_cast<size_t>(buffer.size())};
}

void bind_plan(py::module_& module) {
    py::class_<StepPlan, PlanPointer>(module, "StepPlan",
                                      "What one step does: S sequences, Q query rows, R output rows.")
        .def_readonly("step", &StepPlan::step, "1, 2, ... in schedule order")
        .def_readonly("kind", &StepPlan::kind)
        .def_property_readonly("is_prefill", &StepPlan::is_prefill)
        .def_property_readonly("num_seqs", &StepPlan::num_seqs, "S")
        .def_readonly("num_rows", &StepPlan::num_rows, "Q")
        .def_readonly("num_samples", &StepPlan::num_outputs, "R: output rows, which are the sampling rows")
        .def_readonly("max_blocks", &StepPlan::max_blocks, "columns of block_tables")
        .def_readonly("max_seqlen_q", &StepPlan::max_seqlen_q)
        .def_readonly("max_seqlen_k", &StepPlan::max_seqlen_k)
        .def_property_readonly("num_prefill_tokens",
                               [](const StepPlan& plan) { return plan.is_prefill() ? plan.num_rows : 0; })
        .def_property_readonly("num_decode_tokens",
                               [](const StepPlan& plan) { return plan.is_prefill() ? 0 : plan.num_rows; })
        .def_readonly("num_draft_rows", &StepPlan::num_draft_rows)
        .def_property_readonly("num_drafting", &StepPlan::num_drafting,
                               "sequences that propose drafts at the end of the step: the last ones")
        .def_readonly("can_redistribute", &StepPlan::can_redistribute,
                      "the device may deal the rows of matched sequences anew: see set_seqlens_q")
        .def_readonly("num_matched", &StepPlan::num_matched, "sequences that are also in the plan in flight")
        .def_readonly("max_num_logprobs", &StepPlan::max_num_logprobs,
                      "largest top list wanted by a row; -1: none")
        .def_readonly("num_running", &StepPlan::num_running)
        .def_readonly("num_waiting", &StepPlan::num_waiting)
        .def_readonly("num_free_blocks", &StepPlan::num_free_blocks)
        .def_property_readonly("attention_tflops",
                               [](const StepPlan& plan) { return plan.attention_flops * 1e-12; })
        .def_property_readonly(
            "is_committed", [](const StepPlan& plan) { return !plan.is_outstanding.load(); },
            "committed or discarded")
        .def_property_readonly(
            "seq_ids",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.id; });
            },
            "int64 [S]")
        .def_property_readonly(
            "seqlens_q",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.num_rows; });
            },
            "int32 [S]")
        .def_property_readonly(
            "max_seqlens_q",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.max_rows; });
            },
            "int32 [S] rows that each sequence has blocks for")
        .def_property_readonly(
            "seqlens_k",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.end(); });
            },
            "int32 [S]")
        .def_property_readonly(
            "num_sampled_rows",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.num_samples; });
            },
            "int32 [S] output rows that may emit a token: the last ones of the sequence; 0 for a chunk "
            "inside a prompt")
        .def_property_readonly(
            "num_scoring_rows",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.num_scoring; });
            },
            "int32 [S] output rows for prompt log-probabilities: the first ones of the sequence")
        .def_property_readonly(
            "remap",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.remap; });
            },
            "int32 [S] index of the same sequence in the plan in flight, -1: none")
        .def_property_readonly("has_copies", &StepPlan::has_copies)
        .def_property_readonly(
            "slot_copies", [](const StepPlan& plan) { return copies_of(plan.slot_copies); },
            "int32 [n, 2] (source, target) state slots to copy before the forward; all sources are read "
            "before any target is written")
        .def_property_readonly(
            "state_copies", [](const StepPlan& plan) { return copies_of(plan.state_copies); },
            "int32 [n, 2] likewise, at the end of the step, when its drafts are made")
        .def_property_readonly(
            "block_copies", [](const StepPlan& plan) { return copies_of(plan.block_copies); },
            "int32 [n, 2] blocks, likewise, at the end of the step")
        .def_property_readonly(
            "forked_ids",
            [](const StepPlan& plan) { return to_array(std::vector<int64_t>(plan.forked_ids)); },
            "int64 [n] sequences that were admitted as copies of one in the plan")
        .def_property_readonly(
            "total_lens",
            [](const StepPlan& plan) {
                return per_sequence(plan, [](const PlanSequence& entry) { return entry.total_length; });
            },
            "int32 [S] of a prefill: tokens up to which decoder rows are needed")
        .def_property_readonly(
            "preempted_ids",
            [](const StepPlan& plan) { return to_array(std::vector<int64_t>(plan.preempted_ids)); },
            "int64 [n] preempted while this step was scheduled");
}

}  // namespace

void bind_batch(py::module_& module, EngineClass& engine) {
    bind_plan(module);
    py::class_<LayoutTable>(module, "Layout", "Where every array stands in a flat buffer.")
        .def_readonly("entries", &LayoutTable::entries, "list of (name, dtype, shape, byte offset)")
        .def_readonly("nbytes", &LayoutTable::num_bytes);
    using Bytes = py::array_t<uint8_t, py::array::c_style>;
    engine
        .def(
            "batch_layout",
            [](EngineCore& core, const StepPlan& plan) { return as_table(core.batch_layout(plan)); },
            py::arg("plan"), "Layout of the forward's inputs.")
        .def(
            "sampling_layout",
            [](EngineCore& core, StepPlan& plan) { return as_table(core.sampling_layout(plan)); },
            py::arg("plan"),
            "Layout of the sampler's inputs; the plan before must be committed when they share sequences.")
        .def(
            "layout",
            [](EngineCore& core, StepPlan& plan) {
                return join(core.batch_layout(plan), core.sampling_layout(plan));
            },
            py::arg("plan"), "Both parts in one buffer.")
        .def(
            "fill_batch",
            [](EngineCore& core, const StepPlan& plan, Bytes& buffer) {
                const std::span<std::byte> bytes = writable_bytes(buffer);
                const py::gil_scoped_release unlocked;
                core.fill_batch(plan, bytes);
            },
            py::arg("plan"), py::arg("buffer").noconvert(),
            "Writes the forward's inputs into uint8 [>= nbytes].")
        .def(
            "fill_sampling",
            [](EngineCore& core, StepPlan& plan, Bytes& buffer) {
                const std::span<std::byte> bytes = writable_bytes(buffer);
                const py::gil_scoped_release unlocked;
                core.fill_sampling(plan, bytes);
            },
            py::arg("plan"), py::arg("buffer").noconvert(),
            "Writes the sampler's inputs into uint8 [>= nbytes].")
        .def(
            "fill",
            [](EngineCore& core, StepPlan& plan, Bytes& buffer) {
                const std::span<std::byte> bytes = writable_bytes(buffer);
                const py::gil_scoped_release unlocked;
                const size_t batch_bytes = static_cast<size_t>(core.batch_layout(plan).num_bytes);
                core.fill_batch(plan, bytes);
                core.fill_sampling(plan, bytes.subspan(batch_bytes));
            },
            py::arg("plan"), py::arg("buffer").noconvert(), "Writes both parts.");
}

}  // namespace deepinfer::bindings
