/// Products whose rows do not depend on their batch.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

inline constexpr int kChunkRows = 48;     // rows of one task of a product
inline constexpr int kColumnUnit = 8;     // tasks split columns at multiples of it

/// out[m, g] = x[m, g] @ w[g * columns : (g + 1) * columns]^T for `groups` independent groups of columns.
struct LinearArgs {
    const void* x;  // [rows, groups, k], strided in its first two dimensions
    DType x_dtype;
    int64_t x_row_stride;    // elements
    int64_t x_group_stride;  // elements
    const void* w;           // [groups * columns, k], contiguous
    DType w_dtype;
    void* out;  // [rows, groups, columns], contiguous
    DType out_dtype;
    int64_t rows;
    int64_t groups;
    int64_t columns;
    int64_t k;
    bool round_inputs;  // to E4M3 in groups of 32; k % 32 == 0
};

void linear(Context& context, const LinearArgs& args);

/// The same for rows sorted by group: rows offsets[g] ... offsets[g + 1] - 1 meet w[g].
struct GroupedLinearArgs {
    const void* x;  // [rows, k]
    DType x_dtype;
    int64_t x_row_stride;  // elements
    const void* w;         // [groups, columns, k], contiguous
    DType w_dtype;
    float* out;              // [rows, columns], contiguous
    const int32_t* offsets;  // [groups + 1], ascending, 0 ... rows; throws std::invalid_argument otherwise
    int64_t rows;
    int64_t groups;
    int64_t columns;
    int64_t k;
};

void grouped_linear(Context& context, const GroupedLinearArgs& args);

/// Address of the float32 form of `rows` rows of `k` values: the input itself where nothing has to change,
/// otherwise a copy in `context.inputs`. Sets `row_stride` to that of the result.
const float* prepare_rows(Context& context, const void* x, DType dtype, bool round, int64_t rows, int64_t k,
                          int64_t& row_stride);

}  // namespace deepinfer::cpu
