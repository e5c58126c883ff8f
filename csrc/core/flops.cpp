#include "flops.hpp"

#include <algorithm>
#include <utility>

#include "check.hpp"

namespace deepinfer {
namespace {

/// sum over x in [0, n) of x / divisor (integer division).
double sum_of_quotients(int64_t n, int64_t divisor) {
    const int64_t full = n / divisor;
    const int64_t rest = n % divisor;
    return static_cast<double>(divisor) * (static_cast<double>(full) * static_cast<double>(full - 1) / 2) +
           static_cast<double>(full) * static_cast<double>(rest);
}

/// sum over t in [1, n] of min((t + offset) / divisor, cap).
double sum_of_keys(const AttentionTerm& term, int64_t n) {
    // (t + offset) / divisor reaches the cap at t = cap * divisor - offset.
    const int64_t growing = std::clamp<int64_t>(term.cap * term.divisor - term.offset - 1, 0, n);
    const double below = sum_of_quotients(growing + term.offset + 1, term.divisor) -
                         sum_of_quotients(term.offset + 1, term.divisor);
    return below + static_cast<double>(n - growing) * static_cast<double>(term.cap);
}

}  // namespace

WorkModel::WorkModel(std::vector<AttentionTerm> terms, double flops_per_token)
    : terms_(std::move(terms)), flops_per_token_(flops_per_token) {
    for (const AttentionTerm& term : terms_) {
        if (term.divisor < 1 || term.offset < 0 || term.cap < 0 || term.flops < 0) {
            throw std::invalid_argument(concat(
                "attention term needs divisor >= 1 and offset, cap, flops >= 0; got flops=", term.flops,
                " divisor=", term.divisor, " offset=", term.offset, " cap=", term.cap));
        }
    }
    if (!(flops_per_token_ > 0)) {
        throw std::invalid_argument(concat("flops_per_token must be > 0, got ", flops_per_token_));
    }
}

double WorkModel::attention_flops(int64_t begin, int64_t end) const {
    double flops = 0.0;
    for (const AttentionTerm& term : terms_) {
        if (end == begin + 1) {
            flops += term.flops * static_cast<double>(std::min((end + term.offset) / term.divisor, term.cap));
        } else {
            flops += term.flops * (sum_of_keys(term, end) - sum_of_keys(term, begin));
        }
    }
    return flops;
}

double WorkModel::recompute_flops(int64_t num_tokens, int64_t num_found) const {
    return flops_per_token_ * static_cast<double>(num_tokens - num_found) +
           attention_flops(num_found, num_tokens);
}

int32_t WorkModel::max_queries(int64_t begin, int32_t max_queries, double budget) const {
    if (attention_flops(begin, begin + max_queries) <= budget) return max_queries;
    int32_t fits = 0;
    int32_t too_many = max_queries;
    while (too_many - fits > 1) {
        const int32_t middle = fits + (too_many - fits) / 2;
        (attention_flops(begin, begin + middle) <= budget ? fits : too_many) = middle;
    }
    return fits;
}

}  // namespace deepinfer
