/// Routed gated MLPs: each row passes its k experts, whose outputs are summed in slot order.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

struct ExpertsArgs {
    const void* x;  // [rows, hidden]
    DType x_dtype;  // with bfloat16 both products and the activation round to it
    int64_t x_row_stride;      // elements
    const int32_t* ids;        // [rows, slots], 0 ... experts - 1; throws std::out_of_range otherwise
    const float* weights;      // [rows, slots]
    const void* w13;           // [experts, 2 * inner, hidden]: gate rows, then up rows
    const void* w2;            // [experts, hidden, inner]
    DType w_dtype;
    float* out;  // [rows, hidden]
    int64_t rows;
    int64_t slots;
    int64_t experts;
    int64_t hidden;
    int64_t inner;
    float limit;        // bound of the activations, 0 for none
    bool round_inputs;  // of both products, to E4M3 in groups of 32
};

void routed_experts(Context& context, const ExpertsArgs& args);

}  // namespace deepinfer::cpu
