/// Methods of `_cpu_ops.Context` for sampling; draw.py and logits.py in deepinfer/sampling pass the tensors.

#include "bindings/bind_cpu.hpp"
#include "cpu/gumbel.hpp"
#include "cpu/truncate.hpp"

namespace py = pybind11;

namespace deepinfer::cpu {

void bind_sampling(ContextClass& context) {
    context.def(
        "truncate",
        [](Context& c, Address scores, int64_t row_stride, int64_t rows, int64_t vocab, Address top_k,
           Address top_p, Address log_min_p, Address out) {
            truncate(c, {at<float>(scores), row_stride, rows, vocab, at<int32_t>(top_k), at<float>(top_p),
                         at<float>(log_min_p), at<float>(out)});
        },
        py::call_guard<py::gil_scoped_release>());
    context.def(
        "gumbel_candidates",
        [](Context& c, Address scores, int64_t row_stride, int64_t rows, int64_t vocab, Address seeds,
           Address index, uint32_t domain, Address tokens, Address words, Address counts) {
            gumbel_candidates(c, {at<float>(scores), row_stride, rows, vocab, at<int64_t>(seeds),
                                  at<int64_t>(index), domain, at<int64_t>(tokens), at<int64_t>(words),
                                  at<int32_t>(counts)});
        },
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace deepinfer::cpu
