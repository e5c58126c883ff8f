/// Verify lengths: step times, the rows that a device dealt, what became of drafts.
#include "bindings.hpp"

namespace deepinfer::bindings {
namespace {

using Points = std::vector<std::tuple<int32_t, int32_t, double>>;
using UndraftedPoints = std::vector<std::pair<int32_t, double>>;

void set_step_times(EngineCore& core, const Points& points, const UndraftedPoints& undrafted) {
    std::vector<StepTimePoint> curve;
    std::vector<UndraftedTime> plain;
    for (const auto& [num_seqs, num_tokens, ms] : points) curve.push_back({num_seqs, num_tokens, ms});
    for (const auto& [num_seqs, ms] : undrafted) plain.push_back({num_seqs, ms});
    core.set_step_times(curve, plain);
}

py::tuple reliability(EngineCore& core) {
    Reliability table = core.calibration().reliability();
    const auto bins = py::ssize_t{Reliability::kBins};
    const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(table.count.size()) / bins, bins};
    return py::make_tuple(to_array(std::move(table.count), shape), to_array(std::move(table.survival), shape),
                          to_array(std::move(table.accepted), shape));
}

}  // namespace

void bind_draft_budget(py::module_& module, EngineClass& engine) {
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    py::class_<DraftBudgetStats>(module, "DraftBudgetStats", "What the draft budget has decided so far.")
        .def_readonly("num_steps", &DraftBudgetStats::num_steps, "decode steps that it decided about")
        .def_readonly("num_full", &DraftBudgetStats::num_full, "steps that verify every draft at hand")
        .def_readonly("num_cut", &DraftBudgetStats::num_cut, "steps that verify some of them")
        .def_readonly("num_none", &DraftBudgetStats::num_none, "steps that verify none of them")
        .def_readonly("num_undrafted", &DraftBudgetStats::num_undrafted, "steps told to propose no drafts")
        .def_readonly("num_probes", &DraftBudgetStats::num_probes, "steps that propose drafts only to look")
        .def_readonly("price", &DraftBudgetStats::price,
                      "survival that one more draft of the newest step would have needed");
    engine
        .def("set_step_times", &set_step_times, py::arg("points"), py::arg("undrafted") = UndraftedPoints{},
             "Step-time curve: [(num_seqs, num_tokens, ms)]; num_seqs 0 in all of them: sizes of captured "
             "graphs. undrafted: [(num_seqs, ms)] of steps of one token per sequence that propose no drafts. "
             "Forgets the corrections by add_step_time.")
        .def("add_step_time", &EngineCore::add_step_time, py::arg("num_seqs"), py::arg("num_tokens"),
             py::arg("ms"), py::arg("is_drafted") = true, py::arg("num_emitted") = -1, Unlocked(),
             "A decode step has taken ms: corrects the curve. With the tokens that it emitted: corrects what "
             "steps with drafts are believed to bring.")
        .def("step_ms", &EngineCore::step_ms, py::arg("num_seqs"), py::arg("num_tokens"),
             "Believed time of a decode step; 0 while no curve is known.")
        .def("undrafted_step_ms", &EngineCore::undrafted_step_ms, py::arg("num_seqs"),
             "Believed time of a step of one token per sequence that proposes no drafts; 0 while unknown.")
        .def(
            "set_seqlens_q",
            [](EngineCore& core, StepPlan& plan, const py::object& seqlens_q) {
                core.set_seqlens_q(plan, to_span<int32_t>(seqlens_q, "seqlens_q"));
            },
            py::arg("plan"), py::arg("seqlens_q"),
            "Query rows int32 [S] as the device dealt them; before the plan's sampling inputs are filled.")
        .def("draft_budget_stats", &EngineCore::draft_budget_stats, "DraftBudgetStats")
        .def(
            "confidence_odds",
            [](EngineCore& core) { return to_array(std::vector<float>(core.calibration().odds())); },
            "float32 [num_draft_tokens] factor that corrects the odds of confidences, by position.")
        .def(
            "num_draft_outcomes",
            [](EngineCore& core) { return to_array(core.calibration().num_outcomes()); },
            "int64 [num_draft_tokens] outcomes that the correction has learnt from.")
        .def(
            "reliability", &reliability,
            "(count int64, sum of survivals float64, accepted int64), each [num_draft_tokens, 20]: blocks by "
            "estimated survival up to a position, and how many of them stood so far.")
        .def("reset_reliability", &EngineCore::reset_reliability, "Empties the table of reliability().");
}

}  // namespace deepinfer::bindings
