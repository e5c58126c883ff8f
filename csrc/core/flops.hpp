/// Work model: closed forms for the attention work of a range of queries and the cost of recomputing a
/// prefix.
#pragma once

#include <cstdint>
#include <vector>

namespace deepinfer {

/// Keys of one kind that a query sees: `flops * min((t + offset) / divisor, cap)` for a query with t visible
/// tokens (itself included, t = position + 1). A window of W tokens is {flops, 1, 0, W}; top-k of entries of
/// r tokens is {flops, r, 0, k}; candidate blocks of B entries are {flops * B, r * B, r * (B - 1), C}.
struct AttentionTerm {
    double flops = 0.0;
    int64_t divisor = 1;
    int64_t offset = 0;
    int64_t cap = 0;
};

/// Sums of `AttentionTerm`s over query ranges.
class WorkModel {
public:
    WorkModel(std::vector<AttentionTerm> terms, double flops_per_token);

    /// Attention work of the queries at positions [begin, end).
    double attention_flops(int64_t begin, int64_t end) const;

    /// Work of prefilling `num_tokens` tokens, of which the first `num_found` need none.
    double recompute_flops(int64_t num_tokens, int64_t num_found = 0) const;

    /// Largest n <= max_queries with attention_flops(begin, begin + n) <= budget.
    int32_t max_queries(int64_t begin, int32_t max_queries, double budget) const;

    bool has_attention() const { return !terms_.empty(); }

private:
    std::vector<AttentionTerm> terms_;
    double flops_per_token_;
};

}  // namespace deepinfer
