/// Python module `_cpu_ops`: the CPU kernels on addresses and strides. deepinfer/ops checks the tensors.

#include <pybind11/stl.h>

#include <stdexcept>

#include "bindings/bind_cpu.hpp"
#include "cpu/experts.hpp"
#include "cpu/index_scores.hpp"
#include "cpu/linear.hpp"
#include "cpu/sparse_attention.hpp"

namespace py = pybind11;

namespace deepinfer::cpu {
namespace {

RecordKind kind_of(int64_t record_bytes) {
    switch (record_bytes) {
        case kWindowRecordBytes:
            return RecordKind::kWindow;
        case kMainRecordBytes:
            return RecordKind::kMain;
        case kKeyWidth * 4:
            return RecordKind::kFloat32;
        default:
            throw std::invalid_argument("records are 528 (window), 288 (main) or 2048 (float32) bytes long");
    }
}

/// (address, pages, per_page, page_stride, record_stride, record_bytes, index address, width, index_stride)
using PoolTuple = std::tuple<Address, int64_t, int64_t, int64_t, int64_t, int64_t, Address, int64_t, int64_t>;

RecordPool pool_of(const PoolTuple& p) {
    return {at<uint8_t>(std::get<0>(p)), std::get<1>(p), std::get<2>(p),          std::get<3>(p), std::get<4>(p),
            kind_of(std::get<5>(p)),     at<int32_t>(std::get<6>(p)), std::get<7>(p), std::get<8>(p)};
}

int checked_threads(int num_threads) {
    if (num_threads < 1) throw std::invalid_argument("num_threads is at least 1");
    return num_threads;
}

}  // namespace
}  // namespace deepinfer::cpu

PYBIND11_MODULE(_cpu_ops, m) {
    using namespace deepinfer::cpu;
    m.doc() = "CPU kernels of deepinfer; tensors are passed as addresses, strides in elements unless said otherwise.";

    m.def("instruction_sets", &available_kernels, "Names that `Context` takes on this machine, the best first.");

    ContextClass context(m, "Context", "Threads, scratch memory and the instruction set of the CPU kernels.");
    context
        .def(py::init([](int num_threads, const std::string& instruction_set) {
                 return std::make_unique<Context>(checked_threads(num_threads), instruction_set);
             }),
             py::arg("num_threads"), py::arg("instruction_set") = "auto",
             "num_threads counts the calling thread; instruction_set is auto, generic, avx2 or avx512.")
        .def("set_num_threads",
             [](Context& c, int num_threads) { c.set_num_threads(checked_threads(num_threads)); })
        .def_property_readonly("num_threads", &Context::num_threads)
        .def_property_readonly("instruction_set", [](const Context& c) { return c.kernels().name; })
        .def(
            "linear",
            [](Context& c, Address x, bool x_bf16, int64_t x_row_stride, int64_t x_group_stride, Address w,
               bool w_bf16, Address out, bool out_bf16, int64_t rows, int64_t groups, int64_t columns, int64_t k,
               bool round_inputs) {
                linear(c, {at<void>(x), dtype_of(x_bf16), x_row_stride, x_group_stride, at<void>(w),
                           dtype_of(w_bf16), at<void>(out), dtype_of(out_bf16), rows, groups, columns, k,
                           round_inputs});
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "grouped_linear",
            [](Context& c, Address x, bool x_bf16, int64_t x_row_stride, Address w, bool w_bf16, Address out,
               Address offsets, int64_t rows, int64_t groups, int64_t columns, int64_t k) {
                grouped_linear(c, {at<void>(x), dtype_of(x_bf16), x_row_stride, at<void>(w), dtype_of(w_bf16),
                                   at<float>(out), at<int32_t>(offsets), rows, groups, columns, k});
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "routed_experts",
            [](Context& c, Address x, bool x_bf16, int64_t x_row_stride, Address ids, Address weights, Address w13,
               Address w2, bool w_bf16, Address out, int64_t rows, int64_t slots, int64_t experts, int64_t hidden,
               int64_t inner, float limit, bool round_inputs) {
                routed_experts(c, {at<void>(x), dtype_of(x_bf16), x_row_stride, at<int32_t>(ids),
                                   at<float>(weights), at<void>(w13), at<void>(w2), dtype_of(w_bf16),
                                   at<float>(out), rows, slots, experts, hidden, inner, limit, round_inputs});
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "sparse_attention",
            [](Context& c, Address q, bool q_bf16, Address out, int64_t rows, int64_t heads,
               const PoolTuple& window, const PoolTuple& main, Address sink, float scale) {
                sparse_attention(c, {at<void>(q), dtype_of(q_bf16), at<void>(out), rows, heads, pool_of(window),
                                     pool_of(main), at<float>(sink), scale});
            },
            "A pool is (address, pages, per_page, page_stride, record_stride, record_bytes, index, width, "
            "index_stride), strides of the pool in bytes.",
            py::call_guard<py::gil_scoped_release>())
        .def(
            "index_scores",
            [](Context& c, Address q, bool q_bf16, Address weights, bool weights_bf16, Address codes,
               int64_t code_block_stride, int64_t code_entry_stride, Address scales, int64_t scale_block_stride,
               int64_t scale_entry_stride, int64_t blocks, int64_t entries, Address block_tables,
               int64_t sequences, int64_t table_width, int64_t table_stride, Address row_seq, Address num_visible,
               Address out, int64_t rows, int64_t heads, int64_t max_visible) {
                index_scores(c, {at<void>(q), dtype_of(q_bf16), at<void>(weights), dtype_of(weights_bf16),
                                 at<uint8_t>(codes), code_block_stride, code_entry_stride, at<uint8_t>(scales),
                                 scale_block_stride, scale_entry_stride, blocks, entries,
                                 at<int32_t>(block_tables), sequences, table_width, table_stride,
                                 at<int32_t>(row_seq), at<int32_t>(num_visible), at<float>(out), rows, heads,
                                 max_visible});
            },
            "Strides of codes and scales are in bytes.", py::call_guard<py::gil_scoped_release>())
        .def(
            "candidate_scores",
            [](Context& c, Address q, bool q_bf16, Address weights, bool weights_bf16, Address codes,
               int64_t code_block_stride, int64_t code_entry_stride, Address scales, int64_t scale_block_stride,
               int64_t scale_entry_stride, int64_t blocks, int64_t entries, Address block_tables,
               int64_t sequences, int64_t table_width, int64_t table_stride, Address row_seq, Address num_visible,
               Address out, int64_t rows, int64_t heads, int64_t max_visible, Address candidates,
               int64_t num_candidates, int64_t block_size) {
                candidate_scores(c, {at<void>(q), dtype_of(q_bf16), at<void>(weights), dtype_of(weights_bf16),
                                     at<uint8_t>(codes), code_block_stride, code_entry_stride, at<uint8_t>(scales),
                                     scale_block_stride, scale_entry_stride, blocks, entries,
                                     at<int32_t>(block_tables), sequences, table_width, table_stride,
                                     at<int32_t>(row_seq), at<int32_t>(num_visible), at<float>(out), rows, heads,
                                     max_visible},
                                 at<int32_t>(candidates), num_candidates, block_size);
            },
            "Strides of codes and scales are in bytes.", py::call_guard<py::gil_scoped_release>());
    bind_row_ops(context);
    bind_sampling(context);
}
