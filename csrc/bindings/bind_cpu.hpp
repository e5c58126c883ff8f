/// What the files of the `_cpu_ops` bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "cpu/context.hpp"

namespace deepinfer::cpu {

using Address = uintptr_t;
using ContextClass = pybind11::class_<Context>;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

inline DType dtype_of(bool is_bfloat16) { return is_bfloat16 ? DType::kBFloat16 : DType::kFloat32; }

/// Adds the operators of cpu/row_ops.hpp as methods.
void bind_row_ops(ContextClass& context);

/// Adds cpu/gumbel.hpp and cpu/truncate.hpp.
void bind_sampling(ContextClass& context);

}  // namespace deepinfer::cpu
