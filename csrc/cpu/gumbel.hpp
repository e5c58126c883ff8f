/// Search for the tokens that can win a draw by Gumbel noise.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

/// Rows of scores with seed and index of the token that each generates. deepinfer/sampling/philox.py defines the
/// noise and draw.py chooses among the candidates.
struct GumbelArgs {
    const float* scores;  // [rows, vocab], finite or -inf
    int64_t row_stride;   // elements
    int64_t rows;
    int64_t vocab;
    const int64_t* seeds;  // [rows] bit patterns of unsigned numbers
    const int64_t* index;  // [rows]
    uint32_t domain;
    int64_t* tokens;  // out [rows, vocab]: the first counts[r] values of a row are ids, ascending
    int64_t* words;   // out [rows, vocab]: their random words
    int32_t* counts;  // out [rows]
};

/// Lists tokens among which is each row's largest score + noise, whatever the last bits of either. A row without
/// a possible token has none.
void gumbel_candidates(Context& context, const GumbelArgs& args);

}  // namespace deepinfer::cpu
