/// Helpers of the `_core` bindings: arrays in without a silent conversion, arrays out that own their memory.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "../core/check.hpp"
#include "../core/engine_core.hpp"

namespace deepinfer::bindings {

namespace py = pybind11;

/// The class through which Python sees a core.
using EngineClass = py::class_<EngineCore, std::shared_ptr<EngineCore>>;

/// A numpy array of `shape` that takes over `values`.
template <typename T>
py::array_t<T> to_array(std::vector<T>&& values, std::vector<py::ssize_t> shape) {
    auto* owner = new std::vector<T>(std::move(values));  // freed by the capsule
    py::capsule capsule(owner, [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
    return py::array_t<T>(std::move(shape), owner->data(), capsule);
}

template <typename T>
py::array_t<T> to_array(std::vector<T>&& values) {
    const auto size = static_cast<py::ssize_t>(values.size());
    return to_array(std::move(values), {size});
}

/// View of a C-contiguous array of exactly this type; `ValueError` names the argument otherwise.
template <typename T>
std::span<const T> to_span(const py::object& object, const char* name, int num_dims = 1) {
    if (object.is_none()) return {};
    if (!py::isinstance<py::array_t<T, py::array::c_style>>(object)) {
        throw std::invalid_argument(concat(name, " must be a C-contiguous numpy array of ",
                                           py::str(py::dtype::of<T>()).template cast<std::string>()));
    }
    const auto array = py::reinterpret_borrow<py::array_t<T, py::array::c_style>>(object);
    if (array.ndim() != num_dims) {
        throw std::invalid_argument(
            concat(name, " must have ", num_dims, " dimension(s), got ", array.ndim()));
    }
    return {array.data(), static_cast<size_t>(array.size())};
}

/// Columns of a two-dimensional array, 0 for None.
inline int32_t num_columns(const py::object& object) {
    if (object.is_none()) return 0;
    const auto array = py::reinterpret_borrow<py::array>(object);
    return array.ndim() == 2 ? static_cast<int32_t>(array.shape(1)) : 0;
}

void bind_config(py::module_& module);
void bind_batch(py::module_& module, EngineClass& engine);
void bind_draft_budget(py::module_& module, EngineClass& engine);
void bind_scheduler(py::module_& module, EngineClass& engine);
void bind_sequence(py::module_& module, EngineClass& engine);

}  // namespace deepinfer::bindings
