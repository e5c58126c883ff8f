/// Python module `_core`: scheduling, input building and commit. No torch, no device.
#include "../core/check.hpp"
#include "bindings.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
    using namespace deepinfer;
    module.doc() = "Scheduler core: decides who runs, fills flat input buffers, commits results.";
    py::register_local_exception<UnknownSequenceError>(module, "UnknownSequenceError", PyExc_KeyError);
    py::register_local_exception<InternalError>(module, "InternalError", PyExc_RuntimeError);
    bindings::bind_config(module);
    bindings::EngineClass engine(
        module, "EngineCore",
        "Scheduler of one engine. Safe to call from any thread; no state outside of the object.");
    bindings::bind_batch(module, engine);
    bindings::bind_draft_budget(module, engine);
    bindings::bind_scheduler(module, engine);
    bindings::bind_sequence(module, engine);
}
