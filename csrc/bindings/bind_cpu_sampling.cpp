/// Methods of `_cpu_ops.Context` for sampling; deepinfer/sampling/draw.py passes the tensors.

#include "bindings/bind_cpu.hpp"
#include "cpu/gumbel.hpp"

namespace py = pybind11;

namespace deepinfer::cpu {

void bind_sampling(ContextClass& context) {
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
