/// Scores of index queries against the paged index keys of their sequence.
#pragma once

#include "cpu/context.hpp"

namespace deepinfer::cpu {

struct IndexScoresArgs {
    const void* q;  // [rows, heads, 128], contiguous
    DType q_dtype;
    const void* weights;  // [rows, heads], contiguous
    DType weights_dtype;
    const uint8_t* codes;  // [blocks, entries, 64] E2M1 pairs, or float32 keys [blocks, entries, 128]
    int64_t code_block_stride;  // bytes
    int64_t code_entry_stride;  // bytes
    const uint8_t* scales;      // [blocks, entries, 4] E8M0, null for float32 keys
    int64_t scale_block_stride; // bytes
    int64_t scale_entry_stride; // bytes
    int64_t blocks;
    int64_t entries;
    const int32_t* block_tables;  // [sequences, table_width]
    int64_t sequences;
    int64_t table_width;
    int64_t table_stride;        // entries from sequence to sequence
    const int32_t* row_seq;      // [rows]
    const int32_t* num_visible;  // [rows], at most max_visible
    float* out;                  // [rows, max_visible]
    int64_t rows;
    int64_t heads;
    int64_t max_visible;
};

/// out[i, j] = sum_h weights[i, h] * relu(q[i, h] . key j), channels and heads in order; -inf where row i does
/// not see entry j. Throws std::out_of_range for a sequence, block or count past its bound.
void index_scores(Context& context, const IndexScoresArgs& args);

/// The scores of `index_scores` at the entries of each row's blocks: candidates is [rows, num_candidates] numbers of
/// blocks of `block_size` entries, negative for none; out is [rows, num_candidates * block_size], -inf where there is
/// no entry or the row does not see it. `max_visible` only bounds `num_visible`. Throws as `index_scores`.
void candidate_scores(Context& context, const IndexScoresArgs& args, const int32_t* candidates, int64_t num_candidates,
                      int64_t block_size);

}  // namespace deepinfer::cpu
