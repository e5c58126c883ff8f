#include "cpu/experts.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/linear.hpp"

namespace deepinfer::cpu {
namespace {

/// Some (row, slot) pairs of one expert.
struct Chunk {
    int64_t expert;
    const int32_t* pairs;  // row * slots + slot
    int64_t num_pairs;
};

/// Pairs sorted by expert, those of an expert in row order.
std::vector<int32_t> sort_pairs(const ExpertsArgs& a, std::vector<int64_t>& starts) {
    const int64_t num_pairs = a.rows * a.slots;
    starts.assign(static_cast<size_t>(a.experts) + 1, 0);
    for (int64_t i = 0; i < num_pairs; ++i) {
        if (a.ids[i] < 0 || a.ids[i] >= a.experts) {
            throw std::out_of_range("expert id " + std::to_string(a.ids[i]) + " is not below " +
                                    std::to_string(a.experts));
        }
        ++starts[static_cast<size_t>(a.ids[i]) + 1];
    }
    for (size_t e = 1; e < starts.size(); ++e) starts[e] += starts[e - 1];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    std::vector<int32_t> pairs(static_cast<size_t>(num_pairs));
    for (int64_t i = 0; i < num_pairs; ++i) {
        pairs[static_cast<size_t>(next[static_cast<size_t>(a.ids[i])]++)] = static_cast<int32_t>(i);
    }
    return pairs;
}

const void* matrix(const void* base, DType dtype, int64_t elements) {
    return static_cast<const char*>(base) + elements * (dtype == DType::kFloat32 ? 4 : 2);
}

/// Channels of one task, a multiple of `unit`, so that about `wanted` tasks come of `chunks` pieces.
int64_t channels_per_task(int64_t channels, int64_t unit, int64_t chunks, int64_t wanted) {
    const int64_t pieces = std::max<int64_t>(1, wanted / chunks);
    return std::min(channels, ceil_div(ceil_div(channels, pieces), unit) * unit);
}

}  // namespace

void routed_experts(Context& context, const ExpertsArgs& a) {
    if (a.rows == 0 || a.hidden == 0) return;
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();
    std::vector<int64_t> starts;
    const std::vector<int32_t> pairs = sort_pairs(a, starts);
    std::vector<Chunk> chunks;
    for (int64_t e = 0; e < a.experts; ++e) {
        for (int64_t p = starts[static_cast<size_t>(e)]; p < starts[static_cast<size_t>(e) + 1]; p += kChunkRows) {
            chunks.push_back({e, pairs.data() + p,
                              std::min<int64_t>(kChunkRows, starts[static_cast<size_t>(e) + 1] - p)});
        }
    }
    const int64_t num_chunks = static_cast<int64_t>(chunks.size()), num_pairs = a.rows * a.slots;
    int64_t row_stride = a.x_row_stride;
    const float* x = prepare_rows(context, a.x, a.x_dtype, a.round_inputs, a.rows, a.hidden, row_stride);

    // First products and activation: a task holds the same channels of gate and up.
    const int64_t wanted = wanted_tasks(context, num_pairs * a.inner * a.hidden * 2);
    const int64_t inner = channels_per_task(a.inner, 32, num_chunks, wanted);  // 32 share a scale
    const int64_t inner_chunks = ceil_div(a.inner, inner);
    float* activations = context.middle.reserve<float>(num_pairs * a.inner);  // [pair, inner]
    context.reserve_scratch<float>(2 * kChunkRows * inner);
    context.pool().run(static_cast<int>(num_chunks * inner_chunks), [&](int task, int thread) {
        const Chunk& chunk = chunks[static_cast<size_t>(task / inner_chunks)];
        const int64_t first = task % inner_chunks * inner, count = std::min(inner, a.inner - first);
        const float* rows[kChunkRows];
        for (int64_t i = 0; i < chunk.num_pairs; ++i) rows[i] = x + chunk.pairs[i] / a.slots * row_stride;
        float* gate = context.scratch<float>(thread);
        float* up = gate + kChunkRows * inner;
        const int64_t at = (chunk.expert * 2 * a.inner + first) * a.hidden;
        GemmTile tile{rows, static_cast<int>(chunk.num_pairs), matrix(a.w13, a.w_dtype, at), a.w_dtype, a.hidden,
                      static_cast<int>(count), static_cast<int>(a.hidden), gate, inner};
        kernels.gemm(tile);
        tile.w = matrix(a.w13, a.w_dtype, at + a.inner * a.hidden);
        tile.out = up;
        kernels.gemm(tile);
        for (int64_t i = 0; i < chunk.num_pairs; ++i) {
            kernels.gated_row(gate + i * inner, up + i * inner, static_cast<int>(count), a.weights[chunk.pairs[i]],
                              a.limit, a.x_dtype, a.round_inputs,
                              activations + chunk.pairs[i] * a.inner + first);
        }
    });

    // Second products: [pair, hidden], written to the pair's own row.
    const int64_t hidden = channels_per_task(a.hidden, kColumnUnit, num_chunks, wanted);
    const int64_t hidden_chunks = ceil_div(a.hidden, hidden);
    float* outputs = context.results.reserve<float>(num_pairs * a.hidden);
    context.reserve_scratch<float>(kChunkRows * hidden);
    context.pool().run(static_cast<int>(num_chunks * hidden_chunks), [&](int task, int thread) {
        const Chunk& chunk = chunks[static_cast<size_t>(task / hidden_chunks)];
        const int64_t first = task % hidden_chunks * hidden, count = std::min(hidden, a.hidden - first);
        const float* rows[kChunkRows];
        for (int64_t i = 0; i < chunk.num_pairs; ++i) rows[i] = activations + chunk.pairs[i] * a.inner;
        float* tile = context.scratch<float>(thread);
        kernels.gemm({rows, static_cast<int>(chunk.num_pairs),
                      matrix(a.w2, a.w_dtype, (chunk.expert * a.hidden + first) * a.inner), a.w_dtype, a.inner,
                      static_cast<int>(count), static_cast<int>(a.inner), tile, count});
        for (int64_t i = 0; i < chunk.num_pairs; ++i) {
            kernels.store_row(tile + i * count, static_cast<int>(count), DType::kFloat32,
                              outputs + chunk.pairs[i] * a.hidden + first);
        }
    });

    const int64_t sum_tasks = std::min(wanted_tasks(context, num_pairs * a.hidden * 4), a.rows);
    const int64_t row_chunk = ceil_div(a.rows, sum_tasks);
    context.pool().run(static_cast<int>(ceil_div(a.rows, row_chunk)), [&](int task, int) {
        for (int64_t row = task * row_chunk; row < std::min((task + 1) * row_chunk, a.rows); ++row) {
            float* out = a.out + row * a.hidden;
            std::fill(out, out + a.hidden, 0.0f);
            for (int64_t slot = 0; slot < a.slots; ++slot) {
                kernels.add_row(outputs + (row * a.slots + slot) * a.hidden, static_cast<int>(a.hidden), a.x_dtype,
                                out);
            }
        }
    });
}

}  // namespace deepinfer::cpu
