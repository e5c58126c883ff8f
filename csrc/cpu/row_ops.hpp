/// Operators that treat every row alone: norm, rotation, residual streams, router, activation, encoders.
/// Each is the CPU backend of the operator of the same name in tilelang_ops or deepinfer/ops.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

struct NormArgs {
    const void* x;  // [rows, n], strided rows
    DType dtype;
    int64_t x_row_stride;  // elements
    const float* weight;   // [n]
    float eps;
    void* out;  // [rows, n], contiguous
    int64_t rows;
    int64_t n;
};
void rms_norm(Context& context, const NormArgs& args);

struct RotateArgs {
    void* x;  // first rotated channel of the first vector
    DType dtype;
    int64_t row_stride;     // elements
    int64_t vector_stride;  // elements
    int64_t rows;
    int64_t vectors;  // of a row
    const float* cos;  // [rows, pairs]
    const float* sin;  // [rows, pairs]
    int64_t pairs;     // at most kMaxPairs
};
void rotate(Context& context, const RotateArgs& args);

struct StreamsArgs {
    const void* values;  // [rows, streams, width]
    DType dtype;
    int64_t rows;
    int64_t streams;  // at most kMaxStreams
    int64_t width;
    const void* output;  // [rows, width] or null
    const float* post;   // [rows, streams]
    const float* comb;   // [rows, streams, streams]
    void* new_values;    // [rows, streams, width]
    const float* pre;    // [rows, streams]
    void* collapsed;     // [rows, width] or null
    float* mean_square;  // [rows] or null
};
void advance_streams(Context& context, const StreamsArgs& args);

struct MixArgs {
    const float* projection;   // [rows, (2 + streams) * streams]
    const float* mean_square;  // [rows]
    const float* scale;
    const float* base;
    int64_t rows;
    int64_t streams;  // at most kMaxStreams
    int64_t rounds;
    float eps;
    float norm_eps;
    float* pre;   // [rows, streams]
    float* post;  // [rows, streams]
    float* comb;  // [rows, streams, streams]
};
void mix_coefficients(Context& context, const MixArgs& args);

struct RouteArgs {
    const float* logits;      // [rows, experts]
    const float* bias;        // [experts]
    const float* image_bias;  // [experts] or null
    const uint8_t* is_image;  // [rows] or null
    int64_t rows;
    int64_t experts;
    int64_t selected;
    float scale;
    int32_t* ids;    // [rows, selected]
    float* weights;  // [rows, selected]
};
void route_topk(Context& context, const RouteArgs& args);

struct SwigluArgs {
    const void* gate_up;  // [rows, 2 * width], strided rows
    DType dtype;
    int64_t row_stride;   // elements
    const float* weight;  // [rows] or null
    float limit;
    void* out;  // [rows, width]
    DType out_dtype;
    int64_t rows;
    int64_t width;
};
void swiglu(Context& context, const SwigluArgs& args);

struct GateArgs {
    const void* values;     // [rows, streams, width]
    const void* key_value;  // [rows, streams + 1, width]
    DType dtype;
    const float* weight;  // [streams, width]
    int64_t rows;
    int64_t streams;
    int64_t width;
    float eps;
    float scale;
    void* out;  // [rows, streams, width]
};
void gate_streams(Context& context, const GateArgs& args);

enum class Encoding : int32_t { kFp8, kFp4, kMxfp4 };

/// Encodes rows and scatters codes and scales to records of one or two strided fields.
struct StoreArgs {
    const void* x;  // [rows, n], strided rows
    DType dtype;
    int64_t x_row_stride;  // elements
    Encoding encoding;
    uint8_t* codes;  // first record's codes
    int64_t code_part_stride;  // bytes
    int64_t code_record_stride;
    uint8_t* scales;
    int64_t scale_part_stride;
    int64_t scale_record_stride;
    int64_t parts;
    int64_t records;       // of a part
    const int64_t* index;  // [rows] record numbers, negative writes nothing; throws past the pool
    int64_t rows;
    int64_t n;
};
void store_records(Context& context, const StoreArgs& args);

struct RoundArgs {
    const void* x;  // [rows, n], contiguous
    DType dtype;
    void* out;  // like x
    int64_t rows;
    int64_t n;
};
void round_mxfp4(Context& context, const RoundArgs& args);

}  // namespace deepinfer::cpu
