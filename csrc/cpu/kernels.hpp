/// The inner loops of the CPU kernels: single-threaded, one set for each instruction set, all with the same
/// order of summation. The drivers (linear, experts, sparse_attention, index_scores) cut work into these pieces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace deepinfer::cpu {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1 };

inline constexpr int kLanes = 16;              // lanes of every sum over a contiguous dimension
inline constexpr int kKeyWidth = 512;          // channels of an attention key
inline constexpr int kSegmentKeys = 64;        // keys whose weighted values are summed before segments are merged
inline constexpr int kIndexWidth = 128;        // channels of an index key
inline constexpr int kPanelKeys = 16;          // index keys scored together, one in each lane
inline constexpr int kWindowRecordBytes = 528; // 512 E4M3, 16 E8M0 over 32 channels
inline constexpr int kMainRecordBytes = 288;   // 256 bytes of E2M1 pairs, 32 E4M3 over 16 channels

/// out[i, j] = sum_k x[i][k] * w[j * w_stride + k]; lane k % 16 adds in order of k, then the lanes as a tree.
struct GemmTile {
    const float* const* x;  // [rows] pointers to k values
    int rows;
    const void* w;  // float32 or bfloat16
    DType w_dtype;
    int64_t w_stride;  // elements
    int columns;
    int k;
    float* out;
    int64_t out_stride;  // elements
};

enum class RecordKind : int32_t { kWindow, kMain, kFloat32 };

/// Up to kSegmentKeys keys of one query row, for all its heads.
struct AttentionSegment {
    const float* const* q;  // [heads] pointers to 512 values
    int heads;
    const float* const* keys;  // [num_keys] pointers to 512 decoded values
    int num_keys;
    float scale;
    float* weights;  // scratch [heads, kSegmentKeys]
    float* maxima;   // out [heads] largest logit
    float* sums;     // out [heads] sum of exp(logit - largest)
    float* values;   // out [heads, 512] weighted sum of the keys
};

inline constexpr int kMaxPairs = 256;   // channel pairs of one rotated vector
inline constexpr int kMaxStreams = 8;   // residual streams of a row

/// One row of residual streams: adds a sublayer's output, collapses, measures. See `advance_streams`.
struct StreamsRow {
    const void* values;  // [streams, width]
    DType dtype;         // of values, output, new_values, collapsed
    int streams;
    int width;
    const void* output;  // [width], null when nothing is pending
    const float* post;   // [streams]
    const float* comb;   // [streams, streams], first index the old stream
    void* new_values;    // [streams, width]
    const float* pre;    // [streams]
    void* collapsed;     // [width], null when not wanted
    float* mean_square;  // null when not wanted
};

/// One row of mixing coefficients. See `mix_coefficients`.
struct MixRow {
    const float* projection;  // [(2 + streams) * streams]
    float mean_square;
    const float* scale;
    const float* base;
    int streams;
    int rounds;
    float eps;
    float norm_eps;
    float* pre;   // [streams]
    float* post;  // [streams]
    float* comb;  // [streams, streams]
};

/// One row of routing. See `route_topk`.
struct RouteRow {
    const float* logits;  // [experts]
    const float* bias;    // [experts]
    int experts;
    int selected;
    float scale;
    float* scores;   // scratch [experts]
    float* keys;     // scratch [experts]
    uint8_t* taken;  // scratch [experts], all zero before and after
    int32_t* ids;    // [selected]
    float* weights;  // [selected]
};

/// One row of gated values. See `gate_streams`.
struct GateRow {
    const void* values;     // [streams, width]
    const void* key_value;  // [streams + 1, width]
    DType dtype;
    const float* weight;  // [streams, width]
    int streams;
    int width;
    float eps;
    float scale;  // width^-0.5
    void* out;    // [streams, width]
};

struct Kernels {
    const char* name;

    void (*gemm)(const GemmTile& tile);

    /// Widens n values; rounds them to E4M3 with a power-of-two scale for each 32 when `round` (n % 32 == 0).
    void (*prepare_row)(const void* x, DType dtype, bool round, int n, float* out);

    /// Stores n values as `dtype`, rounding once.
    void (*store_row)(const float* x, int n, DType dtype, void* out);

    /// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight. bfloat16 `dtype` rounds gate, up and the
    /// result, then `round` puts it on the E4M3 grid. A limit of 0 is none.
    void (*gated_row)(const float* gate, const float* up, int n, float weight, float limit, DType dtype,
                      bool round, float* out);

    /// out[i] += x[i], after rounding x to `dtype`.
    void (*add_row)(const float* x, int n, DType dtype, float* out);

    /// One attention record as 512 float32 values.
    void (*decode_record)(const uint8_t* record, RecordKind kind, float* out);

    void (*attend)(const AttentionSegment& segment);

    /// Merges the segments of one head in order and divides by exp(sink) + sum: out [512] float32.
    /// Segment s has its maximum and sum at [s * stride] and its values at [s * stride * 512].
    void (*merge)(const float* maxima, const float* sums, const float* values, int64_t stride, int num_segments,
                  float sink, float* out);

    /// Decodes index keys into a panel [128][16], a key in each lane; all 16 keys must be readable.
    void (*decode_panel)(const uint8_t* codes, int64_t code_stride, const uint8_t* scales, int64_t scale_stride,
                         float* panel);

    /// out[16] = sum_h weights[h] * relu(q[h] . key), h in order; `heads` is a multiple of `index_heads`.
    void (*score_panel)(const float* panel, const float* q, const float* weights, int heads, float* out);
    int index_heads;

    /// (x / sqrt(mean(x^2) + eps)) * weight, rounded once to `dtype`.
    void (*norm_row)(const void* x, DType dtype, const float* weight, float eps, int n, void* out);

    /// Turns `pairs` adjacent channel pairs in place; products and sums are rounded one by one.
    void (*rotate_vector)(void* x, DType dtype, const float* cos, const float* sin, int pairs);

    void (*advance_row)(const StreamsRow& row);
    void (*mix_row)(const MixRow& row);
    void (*route_row)(const RouteRow& row);
    void (*gate_row)(const GateRow& row);

    /// Codes and scales of n values, in the release's formats; n is a multiple of the scale group.
    void (*encode_fp8)(const void* x, DType dtype, int n, uint8_t* codes, uint8_t* scales);
    void (*encode_fp4)(const void* x, DType dtype, int n, uint8_t* codes, uint8_t* scales);
    void (*encode_mxfp4)(const void* x, DType dtype, int n, uint8_t* codes, uint8_t* scales);

    /// The values that MXFP4 gives, in `dtype`.
    void (*round_mxfp4)(const void* x, DType dtype, int n, void* out);
};

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// The kernels called `name` ("generic", "avx2", "avx512"), or the best for this machine when `name` is "auto".
/// Throws std::invalid_argument when the machine lacks them.
const Kernels& select_kernels(std::string_view name);

/// Names of all kernels that this machine can run, the best first.
std::vector<std::string> available_kernels();

}  // namespace deepinfer::cpu
