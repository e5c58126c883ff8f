#include "cpu/row_ops.hpp"

#include <algorithm>
#include <stdexcept>

namespace deepinfer::cpu {
namespace {

template <class T>
T* advance(T* base, DType dtype, int64_t elements) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return static_cast<Byte*>(base) + elements * (dtype == DType::kFloat32 ? 4 : 2);
}

template <class T>
T* offset(T* base, int64_t elements) {
    return base == nullptr ? nullptr : base + elements;
}

/// Calls `each(row, thread)` for all rows; `row_work` is a row's cost in multiply-adds of a product.
template <class Each>
void for_rows(Context& context, int64_t rows, int64_t row_work, const Each& each) {
    if (rows == 0) return;
    const int64_t tasks = std::min(wanted_tasks(context, rows * row_work), rows);
    const int64_t chunk = ceil_div(rows, tasks);
    context.pool().run(static_cast<int>(ceil_div(rows, chunk)), [&](int task, int thread) {
        for (int64_t row = task * chunk; row < std::min(rows, (task + 1) * chunk); ++row) each(row, thread);
    });
}

void check_streams(int64_t streams) {
    if (streams < 1 || streams > kMaxStreams) throw std::invalid_argument("more residual streams than supported");
}

}  // namespace

void rms_norm(Context& context, const NormArgs& a) {
    const std::lock_guard lock(context.mutex);
    for_rows(context, a.rows, a.n * 4, [&](int64_t row, int) {
        context.kernels().norm_row(advance(a.x, a.dtype, row * a.x_row_stride), a.dtype, a.weight, a.eps,
                                   static_cast<int>(a.n), advance(a.out, a.dtype, row * a.n));
    });
}

void rotate(Context& context, const RotateArgs& a) {
    if (a.pairs > kMaxPairs) throw std::invalid_argument("more channel pairs than supported");
    const std::lock_guard lock(context.mutex);
    for_rows(context, a.rows, a.vectors * a.pairs * 16, [&](int64_t row, int) {
        for (int64_t v = 0; v < a.vectors; ++v) {
            context.kernels().rotate_vector(advance(a.x, a.dtype, row * a.row_stride + v * a.vector_stride), a.dtype,
                                            a.cos + row * a.pairs, a.sin + row * a.pairs,
                                            static_cast<int>(a.pairs));
        }
    });
}

void advance_streams(Context& context, const StreamsArgs& a) {
    check_streams(a.streams);
    const std::lock_guard lock(context.mutex);
    const int64_t size = a.streams * a.width;
    for_rows(context, a.rows, size * (a.streams + 4) * 2, [&](int64_t row, int) {
        context.kernels().advance_row(
            {advance(a.values, a.dtype, row * size), a.dtype, static_cast<int>(a.streams), static_cast<int>(a.width),
             a.output == nullptr ? nullptr : advance(a.output, a.dtype, row * a.width),
             offset(a.post, row * a.streams), offset(a.comb, row * a.streams * a.streams),
             a.new_values == nullptr ? nullptr : advance(a.new_values, a.dtype, row * size),
             offset(a.pre, row * a.streams),
             a.collapsed == nullptr ? nullptr : advance(a.collapsed, a.dtype, row * a.width),
             offset(a.mean_square, row)});
    });
}

void mix_coefficients(Context& context, const MixArgs& a) {
    check_streams(a.streams);
    const std::lock_guard lock(context.mutex);
    const int64_t m = a.streams;
    for_rows(context, a.rows, a.rounds * m * m * 64, [&](int64_t row, int) {
        context.kernels().mix_row({a.projection + row * (2 + m) * m, a.mean_square[row], a.scale, a.base,
                                   static_cast<int>(m), static_cast<int>(a.rounds), a.eps, a.norm_eps,
                                   a.pre + row * m, a.post + row * m, a.comb + row * m * m});
    });
}

void route_topk(Context& context, const RouteArgs& a) {
    if (a.selected < 1 || a.selected > a.experts) throw std::invalid_argument("cannot select that many experts");
    const std::lock_guard lock(context.mutex);
    const int64_t padded = ceil_div(a.experts, kLanes) * kLanes;
    const int64_t scratch_bytes = padded * 9;
    context.reserve_scratch<char>(scratch_bytes);
    for (int thread = 0; thread < context.num_threads(); ++thread) {
        std::fill_n(context.scratch<char>(thread), scratch_bytes, '\0');
    }
    for_rows(context, a.rows, a.experts * (32 + a.selected * 4), [&](int64_t row, int thread) {
        float* scores = context.scratch<float>(thread);
        const bool is_image = a.is_image != nullptr && a.is_image[row] != 0;
        context.kernels().route_row({a.logits + row * a.experts, is_image ? a.image_bias : a.bias,
                                     static_cast<int>(a.experts), static_cast<int>(a.selected), a.scale, scores,
                                     scores + padded, reinterpret_cast<uint8_t*>(scores + 2 * padded),
                                     a.ids + row * a.selected, a.weights + row * a.selected});
    });
}

void swiglu(Context& context, const SwigluArgs& a) {
    const std::lock_guard lock(context.mutex);
    const int width = static_cast<int>(a.width);
    context.reserve_scratch<float>(3 * a.width);
    for_rows(context, a.rows, a.width * 32, [&](int64_t row, int thread) {
        float* gate = context.scratch<float>(thread);
        const void* x = advance(a.gate_up, a.dtype, row * a.row_stride);
        context.kernels().prepare_row(x, a.dtype, false, 2 * width, gate);
        context.kernels().gated_row(gate, gate + width, width, a.weight == nullptr ? 1.0f : a.weight[row], a.limit,
                                    DType::kFloat32, false, gate + 2 * width);
        context.kernels().store_row(gate + 2 * width, width, a.out_dtype, advance(a.out, a.out_dtype, row * a.width));
    });
}

void gate_streams(Context& context, const GateArgs& a) {
    const std::lock_guard lock(context.mutex);
    const int64_t size = a.streams * a.width;
    for_rows(context, a.rows, size * 8, [&](int64_t row, int) {
        context.kernels().gate_row({advance(a.values, a.dtype, row * size),
                                    advance(a.key_value, a.dtype, row * (size + a.width)), a.dtype, a.weight,
                                    static_cast<int>(a.streams), static_cast<int>(a.width), a.eps, a.scale,
                                    advance(a.out, a.dtype, row * size)});
    });
}

void store_records(Context& context, const StoreArgs& a) {
    for (int64_t row = 0; row < a.rows; ++row) {
        if (a.index[row] >= a.parts * a.records) throw std::out_of_range("a record number lies past its pool");
    }
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();
    const auto encode = a.encoding == Encoding::kFp8   ? kernels.encode_fp8
                        : a.encoding == Encoding::kFp4 ? kernels.encode_fp4
                                                       : kernels.encode_mxfp4;
    for_rows(context, a.rows, a.n * 32, [&](int64_t row, int) {
        if (a.index[row] < 0) return;
        const int64_t part = a.index[row] / a.records, record = a.index[row] % a.records;
        encode(advance(a.x, a.dtype, row * a.x_row_stride), a.dtype, static_cast<int>(a.n),
               a.codes + part * a.code_part_stride + record * a.code_record_stride,
               a.scales + part * a.scale_part_stride + record * a.scale_record_stride);
    });
}

void round_mxfp4(Context& context, const RoundArgs& a) {
    const std::lock_guard lock(context.mutex);
    for_rows(context, a.rows, a.n * 32, [&](int64_t row, int) {
        context.kernels().round_mxfp4(advance(a.x, a.dtype, row * a.n), a.dtype, static_cast<int>(a.n),
                                      advance(a.out, a.dtype, row * a.n));
    });
}

}  // namespace deepinfer::cpu
