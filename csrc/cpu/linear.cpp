#include "cpu/linear.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace deepinfer::cpu {
namespace {

int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

const void* advance(const void* base, DType dtype, int64_t elements) {
    return static_cast<const char*>(base) + elements * element_bytes(dtype);
}

/// Columns of one task, so that about `wanted` tasks come of `chunks` pieces of all columns.
int64_t columns_per_task(int64_t columns, int64_t chunks, int64_t wanted) {
    const int64_t pieces = std::max<int64_t>(1, wanted / chunks);
    return ceil_div(ceil_div(columns, pieces), kColumnUnit) * kColumnUnit;
}

}  // namespace

const float* prepare_rows(Context& context, const void* x, DType dtype, bool round, int64_t rows, int64_t k,
                          int64_t& row_stride) {
    if (dtype == DType::kFloat32 && !round) return static_cast<const float*>(x);
    const Kernels& kernels = context.kernels();
    float* out = context.inputs.reserve<float>(rows * k);
    const int64_t from_stride = row_stride;
    constexpr int64_t kWorkPerValue = 8;  // in multiply-adds of a product
    const int64_t tasks = std::min(wanted_tasks(context, rows * k * kWorkPerValue), rows);
    const int64_t chunk = ceil_div(rows, tasks);
    context.pool().run(static_cast<int>(ceil_div(rows, chunk)), [&](int task, int) {
        for (int64_t row = task * chunk; row < std::min((task + 1) * chunk, rows); ++row) {
            kernels.prepare_row(advance(x, dtype, row * from_stride), dtype, round, static_cast<int>(k),
                                out + row * k);
        }
    });
    row_stride = k;
    return out;
}

void linear(Context& context, const LinearArgs& a) {
    if (a.rows == 0 || a.groups * a.columns == 0) return;
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();

    // Rounding and widening go row by row; groups that lie side by side make one longer row.
    const float* x = static_cast<const float*>(a.x);
    int64_t row_stride = a.x_row_stride, group_stride = a.x_group_stride;
    if (a.x_dtype != DType::kFloat32 || a.round_inputs) {
        if (a.groups > 1 && group_stride != a.k) throw std::invalid_argument("column groups are not adjacent");
        x = prepare_rows(context, a.x, a.x_dtype, a.round_inputs, a.rows, a.groups * a.k, row_stride);
        group_stride = a.k;
    }

    const int64_t row_chunks = ceil_div(a.rows, kChunkRows);
    const int64_t row_chunk = ceil_div(a.rows, row_chunks);
    const int64_t work = a.rows * a.groups * a.columns * a.k;
    const int64_t columns =
        columns_per_task(a.columns, row_chunks * a.groups, wanted_tasks(context, work));
    const int64_t column_chunks = ceil_div(a.columns, columns);
    if (a.out_dtype != DType::kFloat32) context.reserve_scratch<float>(row_chunk * columns);
    const int64_t out_stride = a.groups * a.columns;

    // A task is (rows, group, columns), columns fastest: neighbours share their rows.
    context.pool().run(static_cast<int>(row_chunks * a.groups * column_chunks), [&](int task, int thread) {
        const int64_t column = task % column_chunks * columns;
        const int64_t group = task / column_chunks % a.groups;
        const int64_t row = task / column_chunks / a.groups * row_chunk;
        const int64_t num_rows = std::min(row_chunk, a.rows - row);
        const int64_t num_columns = std::min(columns, a.columns - column);
        const float* pointers[kChunkRows];
        for (int64_t i = 0; i < num_rows; ++i) pointers[i] = x + (row + i) * row_stride + group * group_stride;
        const int64_t at = row * out_stride + group * a.columns + column;
        const bool is_direct = a.out_dtype == DType::kFloat32;
        float* out = is_direct ? static_cast<float*>(a.out) + at : context.scratch<float>(thread);
        const int64_t stride = is_direct ? out_stride : num_columns;
        kernels.gemm({pointers, static_cast<int>(num_rows),
                      advance(a.w, a.w_dtype, (group * a.columns + column) * a.k), a.w_dtype, a.k,
                      static_cast<int>(num_columns), static_cast<int>(a.k), out, stride});
        if (is_direct) return;
        for (int64_t i = 0; i < num_rows; ++i) {
            kernels.store_row(out + i * stride, static_cast<int>(num_columns), a.out_dtype,
                              static_cast<uint16_t*>(a.out) + at + i * out_stride);
        }
    });
}

void grouped_linear(Context& context, const GroupedLinearArgs& a) {
    bool is_ascending = a.offsets[0] == 0 && a.offsets[a.groups] == a.rows;
    for (int64_t g = 0; g < a.groups; ++g) is_ascending = is_ascending && a.offsets[g] <= a.offsets[g + 1];
    if (!is_ascending) throw std::invalid_argument("group offsets do not ascend from 0 to the number of rows");
    if (a.rows == 0 || a.columns == 0) return;
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();
    int64_t row_stride = a.x_row_stride;
    const float* x = prepare_rows(context, a.x, a.x_dtype, false, a.rows, a.k, row_stride);

    struct Chunk {
        int64_t group, row, num_rows;
    };
    std::vector<Chunk> chunks;
    for (int64_t g = 0; g < a.groups; ++g) {
        for (int64_t row = a.offsets[g]; row < a.offsets[g + 1]; row += kChunkRows) {
            chunks.push_back({g, row, std::min<int64_t>(kChunkRows, a.offsets[g + 1] - row)});
        }
    }
    const int64_t num_chunks = static_cast<int64_t>(chunks.size());
    const int64_t columns =
        columns_per_task(a.columns, num_chunks, wanted_tasks(context, a.rows * a.columns * a.k));
    const int64_t column_chunks = ceil_div(a.columns, columns);
    context.pool().run(static_cast<int>(num_chunks * column_chunks), [&](int task, int) {
        const Chunk& chunk = chunks[static_cast<size_t>(task / column_chunks)];
        const int64_t column = task % column_chunks * columns;
        const float* pointers[kChunkRows];
        for (int64_t i = 0; i < chunk.num_rows; ++i) pointers[i] = x + (chunk.row + i) * row_stride;
        kernels.gemm({pointers, static_cast<int>(chunk.num_rows),
                      advance(a.w, a.w_dtype, (chunk.group * a.columns + column) * a.k), a.w_dtype, a.k,
                      static_cast<int>(std::min(columns, a.columns - column)), static_cast<int>(a.k),
                      a.out + chunk.row * a.columns + column, a.columns});
    });
}

}  // namespace deepinfer::cpu
