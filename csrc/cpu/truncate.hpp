/// Truncation of score rows by min-p, top-k and top-p.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

/// deepinfer/sampling/logits.py says what is kept; `truncate_reference` there is the meaning, bit by bit.
struct TruncateArgs {
    const float* scores;  // [rows, vocab], finite or -inf
    int64_t row_stride;   // elements
    int64_t rows;
    int64_t vocab;
    const int32_t* top_k;    // [rows] -1 = off
    const float* top_p;      // [rows] 1 = off
    const float* log_min_p;  // [rows] logarithm of min-p, -inf = off
    float* out;              // [rows, vocab] the scores, -inf where a token fell out
};

void truncate(Context& context, const TruncateArgs& args);

}  // namespace deepinfer::cpu
