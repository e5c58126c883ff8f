/// Attention of query rows over listed records of a window pool and a main pool.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

/// Records of one pool: index i names record i % per_page of page i / per_page.
struct RecordPool {
    const uint8_t* base;
    int64_t pages;
    int64_t per_page;
    int64_t page_stride;    // bytes
    int64_t record_stride;  // bytes
    RecordKind kind;
    const int32_t* index;  // [rows, width]; negative entries are no keys
    int64_t width;
    int64_t index_stride;  // entries from row to row
};

struct AttentionArgs {
    const void* q;  // [rows, heads, 512], contiguous
    DType q_dtype;
    void* out;  // like q
    int64_t rows;
    int64_t heads;
    RecordPool window;
    RecordPool main;  // width 0 when there is none
    const float* sink;  // [heads]
    float scale;
};

/// Keys keep their order, the window's first; segments of kSegmentKeys keys are merged in order, so a row's
/// result is a function of its query and its keys alone. Throws std::out_of_range for an index past its pool.
void sparse_attention(Context& context, const AttentionArgs& args);

}  // namespace deepinfer::cpu
