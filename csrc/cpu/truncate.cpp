#include "cpu/truncate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

// Plain loops that the compiler makes a version of for each instruction set; contraction is off, so every version
// rounds alike.
#if defined(__x86_64__)
#define DI_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DI_CLONES
#endif

namespace deepinfer::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBlock = 128;  // tokens whose masses are computed together
// Tokens are put into buckets by their distance from the best score, so that only the bucket in which a cut falls
// is ever sorted. Beyond kBuckets / kBucketsPerUnit all masses are 0 and one bucket holds the rest.
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 32.0f;

DI_CLONES float maximum(const float* values, int64_t n) {
    float best = -kInfinity;
    for (int64_t i = 0; i < n; ++i) best = values[i] > best ? values[i] : best;
    return best;
}

/// Buckets of scores below `top`.
DI_CLONES void find_buckets(const float* scores, float top, int n, int32_t* buckets) {
    for (int i = 0; i < n; ++i) {
        const float distance = (top - scores[i]) * kBucketsPerUnit;
        buckets[i] = static_cast<int32_t>(distance < kBuckets - 1 ? distance : kBuckets - 1);
    }
}

/// floor(exp(score - top) * 2^40), by steps that are each rounded once, so that any device can repeat them.
DI_CLONES void find_masses(const float* scores, float top, int n, float* masses) {
    constexpr float kRound = 12582912.0f;  // adding and subtracting 1.5 * 2^23 rounds to an integer, ties to even
    for (int i = 0; i < n; ++i) {
        float x = scores[i] - top;
        x = x > -60.0f ? x : -60.0f;
        const float power = (x * 1.44269504f + kRound) - kRound;
        const float r = (x - power * 0.693359375f) + power * 2.12194440e-4f;
        float p = 1.9875691500e-4f;
        p = p * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
        p = (p * r) * r + r + 1.0f;
        const int32_t bits = (static_cast<int32_t>(power) + 127 + 40) << 23;
        float scale;
        std::memcpy(&scale, &bits, sizeof scale);
        masses[i] = p * scale;
    }
}

DI_CLONES void keep_from(const float* scores, float cut, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = scores[i] >= cut ? scores[i] : -kInfinity;
}

/// A row's tokens that min-p keeps, by buckets, and the work of one thread.
class Row {
public:
    Row(const float* scores, int64_t vocab, float top, float floor, bool has_masses, float* scratch)
        : scores_(scores), vocab_(vocab), top_(top), floor_(floor), sorted_(scratch) {
        counts_.fill(0);
        masses_.fill(0);
        int32_t buckets[kBlock];
        float masses[kBlock];
        for (int64_t first = 0; first < vocab; first += kBlock) {
            const auto n = static_cast<int>(std::min<int64_t>(kBlock, vocab - first));
            const float* block = scores + first;
            find_buckets(block, top, n, buckets);
            if (has_masses) find_masses(block, top, n, masses);
            for (int i = 0; i < n; ++i) {
                if (!(block[i] >= floor) || block[i] == -kInfinity) continue;
                ++counts_[static_cast<size_t>(buckets[i])];
                if (has_masses) masses_[static_cast<size_t>(buckets[i])] += static_cast<int64_t>(masses[i]);
            }
        }
    }

    int64_t count() const {
        int64_t sum = 0;
        for (const int64_t n : counts_) sum += n;
        return sum;
    }

    /// Mass of the `limit` best tokens.
    int64_t mass(int64_t limit) {
        int64_t sum = 0;
        for (size_t bucket = 0; bucket < kBuckets && limit > 0; ++bucket) {
            if (counts_[bucket] <= limit) {
                limit -= counts_[bucket];
                sum += masses_[bucket];
                continue;
            }
            sort(bucket);
            for (int64_t i = 0; i < limit; ++i) sum += mass_of(sorted_[i]);
            limit = 0;
        }
        return sum;
    }

    /// Score of the best token that is number `place` (from 0).
    float at(int64_t place) {
        for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
            if (place < counts_[bucket]) {
                sort(bucket);
                return sorted_[place];
            }
            place -= counts_[bucket];
        }
        return -kInfinity;
    }

    /// Tokens whose mass before them is at most `threshold`.
    int64_t nucleus(int64_t threshold) {
        int64_t before = 0, kept = 0;
        for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
            if (before + masses_[bucket] <= threshold) {
                before += masses_[bucket];
                kept += counts_[bucket];
                continue;
            }
            sort(bucket);
            for (int64_t i = 0; i < counts_[bucket] && before <= threshold; ++i) {
                before += mass_of(sorted_[i]);
                ++kept;
            }
            return kept;
        }
        return kept;
    }

private:
    int64_t mass_of(float score) const {
        float mass;
        find_masses(&score, top_, 1, &mass);
        return static_cast<int64_t>(mass);
    }

    /// Collects a bucket's scores in descending order.
    void sort(size_t bucket) {
        if (sorted_bucket_ == bucket) return;
        sorted_bucket_ = bucket;
        int64_t n = 0;
        int32_t buckets[kBlock];
        for (int64_t first = 0; first < vocab_ && n < counts_[bucket]; first += kBlock) {
            const auto here = static_cast<int>(std::min<int64_t>(kBlock, vocab_ - first));
            const float* block = scores_ + first;
            find_buckets(block, top_, here, buckets);
            for (int i = 0; i < here; ++i) {
                if (buckets[i] != static_cast<int32_t>(bucket)) continue;
                if (block[i] >= floor_ && block[i] > -kInfinity) sorted_[n++] = block[i];
            }
        }
        std::sort(sorted_, sorted_ + n, std::greater<>());
    }

    const float* scores_;
    int64_t vocab_;
    float top_;
    float floor_;
    float* sorted_;  // scores of the bucket sorted last
    size_t sorted_bucket_ = kBuckets;
    std::array<int64_t, kBuckets> counts_;
    std::array<int64_t, kBuckets> masses_;
};

void truncate_row(const TruncateArgs& a, int64_t index, float* scratch) {
    const float* scores = a.scores + index * a.row_stride;
    float* out = a.out + index * a.vocab;
    const float top = maximum(scores, a.vocab), top_p = a.top_p[index];
    if (!std::isfinite(top)) {  // no possible token, or a row that is broken anyway
        std::copy(scores, scores + a.vocab, out);
        return;
    }
    Row row(scores, a.vocab, top, top + a.log_min_p[index], top_p < 1.0f, scratch);
    const int64_t passing = row.count();
    int64_t kept = a.top_k[index] > 0 ? std::min<int64_t>(a.top_k[index], passing) : passing;
    if (top_p < 1.0f) {
        const double total = static_cast<double>(row.mass(kept));
        const auto threshold = static_cast<int64_t>(std::floor(static_cast<double>(top_p) * total));
        kept = std::min(kept, row.nucleus(threshold));
    }
    const float cut = row.at(kept - 1);
    keep_from(scores, cut, a.vocab, out);
    // Of tokens equal to the cut the last ones may have to go.
    int64_t surplus = -kept;
    for (int64_t i = 0; i < a.vocab; ++i) surplus += out[i] >= cut;
    for (int64_t i = a.vocab; surplus > 0;) {
        if (out[--i] != cut) continue;
        out[i] = -kInfinity;
        --surplus;
    }
}

}  // namespace

void truncate(Context& context, const TruncateArgs& a) {
    const std::lock_guard lock(context.mutex);
    constexpr int64_t kWorkPerToken = 64;  // in multiply-adds of a product
    const int64_t tasks = std::min(wanted_tasks(context, a.rows * a.vocab * kWorkPerToken), a.rows);
    if (tasks == 0) return;
    const int64_t chunk = ceil_div(a.rows, tasks);
    context.reserve_scratch<float>(a.vocab);
    context.pool().run(static_cast<int>(ceil_div(a.rows, chunk)), [&](int task, int thread) {
        for (int64_t row = task * chunk; row < std::min((task + 1) * chunk, a.rows); ++row) {
            truncate_row(a, row, context.scratch<float>(thread));
        }
    });
}

}  // namespace deepinfer::cpu
