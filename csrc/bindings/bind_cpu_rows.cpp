/// Methods of `_cpu_ops.Context` for the operators on single rows; deepinfer/ops/rows.py checks the tensors.

#include "bindings/bind_cpu.hpp"
#include "cpu/row_ops.hpp"

namespace py = pybind11;

namespace deepinfer::cpu {

void bind_row_ops(ContextClass& context) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    context
        .def(
            "rms_norm",
            [](Context& c, Address x, bool is_bf16, int64_t x_row_stride, Address weight, float eps, Address out,
               int64_t rows, int64_t n) {
                rms_norm(c, {at<void>(x), dtype_of(is_bf16), x_row_stride, at<float>(weight), eps, at<void>(out),
                             rows, n});
            },
            no_gil)
        .def(
            "rotate",
            [](Context& c, Address x, bool is_bf16, int64_t row_stride, int64_t vector_stride, int64_t rows,
               int64_t vectors, Address cos, Address sin, int64_t pairs) {
                rotate(c, {at<void>(x), dtype_of(is_bf16), row_stride, vector_stride, rows, vectors, at<float>(cos),
                           at<float>(sin), pairs});
            },
            no_gil)
        .def(
            "advance_streams",
            [](Context& c, Address values, bool is_bf16, int64_t rows, int64_t streams, int64_t width,
               Address output, Address post, Address comb, Address new_values, Address pre, Address collapsed,
               Address mean_square) {
                advance_streams(c, {at<void>(values), dtype_of(is_bf16), rows, streams, width, at<void>(output),
                                    at<float>(post), at<float>(comb), at<void>(new_values), at<float>(pre),
                                    at<void>(collapsed), at<float>(mean_square)});
            },
            no_gil)
        .def(
            "mix_coefficients",
            [](Context& c, Address projection, Address mean_square, Address scale, Address base, int64_t rows,
               int64_t streams, int64_t rounds, float eps, float norm_eps, Address pre, Address post, Address comb) {
                mix_coefficients(c, {at<float>(projection), at<float>(mean_square), at<float>(scale),
                                     at<float>(base), rows, streams, rounds, eps, norm_eps, at<float>(pre),
                                     at<float>(post), at<float>(comb)});
            },
            no_gil)
        .def(
            "route_topk",
            [](Context& c, Address logits, Address bias, Address image_bias, Address is_image, int64_t rows,
               int64_t experts, int64_t selected, float scale, Address ids, Address weights) {
                route_topk(c, {at<float>(logits), at<float>(bias), at<float>(image_bias), at<uint8_t>(is_image),
                               rows, experts, selected, scale, at<int32_t>(ids), at<float>(weights)});
            },
            no_gil)
        .def(
            "swiglu",
            [](Context& c, Address gate_up, bool is_bf16, int64_t row_stride, Address weight, float limit,
               Address out, bool out_bf16, int64_t rows, int64_t width) {
                swiglu(c, {at<void>(gate_up), dtype_of(is_bf16), row_stride, at<float>(weight), limit, at<void>(out),
                           dtype_of(out_bf16), rows, width});
            },
            no_gil)
        .def(
            "gate_streams",
            [](Context& c, Address values, Address key_value, bool is_bf16, Address weight, int64_t rows,
               int64_t streams, int64_t width, float eps, float scale, Address out) {
                gate_streams(c, {at<void>(values), at<void>(key_value), dtype_of(is_bf16), at<float>(weight), rows,
                                 streams, width, eps, scale, at<void>(out)});
            },
            no_gil)
        .def(
            "store_records",
            [](Context& c, Address x, bool is_bf16, int64_t x_row_stride, int encoding, Address codes,
               int64_t code_part_stride, int64_t code_record_stride, Address scales, int64_t scale_part_stride,
               int64_t scale_record_stride, int64_t parts, int64_t records, Address index, int64_t rows, int64_t n) {
                store_records(c, {at<void>(x), dtype_of(is_bf16), x_row_stride, static_cast<Encoding>(encoding),
                                  at<uint8_t>(codes), code_part_stride, code_record_stride, at<uint8_t>(scales),
                                  scale_part_stride, scale_record_stride, parts, records, at<int64_t>(index), rows,
                                  n});
            },
            "encoding: 0 FP8, 1 FP4, 2 MXFP4; strides of codes and scales in bytes.", no_gil)
        .def(
            "round_mxfp4",
            [](Context& c, Address x, bool is_bf16, Address out, int64_t rows, int64_t n) {
                round_mxfp4(c, {at<void>(x), dtype_of(is_bf16), at<void>(out), rows, n});
            },
            no_gil);
}

}  // namespace deepinfer::cpu
