#include "progress_weights.hpp"

#include <algorithm>
#include <numeric>

namespace deepinfer {
namespace {

constexpr double kLast = 0.8;  ///< share of the longest time from which a sequence counts as one of the last

}  // namespace

void weigh_progress(std::span<const Progress> sequences, int32_t num_waiting, double single_ms,
                    double batch_ms, std::vector<double>& weights) {
    const size_t count = sequences.size();
    weights.assign(count, 1.0);
    if (count < 2 || num_waiting >= static_cast<int32_t>(count)) return;
    std::vector<double> times(count);
    std::transform(sequences.begin(), sequences.end(), times.begin(),
                   [](const Progress& p) { return p.tokens_left / p.tokens_per_step; });
    if (num_waiting > 0) {
        const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(count);
        std::vector<double> sorted = times;
        const auto last_taken = sorted.begin() + (num_waiting - 1);
        std::nth_element(sorted.begin(), last_taken, sorted.end());
        const double limit = *last_taken;
        int32_t left = num_waiting;
        for (double& time : times) {
            if (left > 0 && time <= limit) {
                time += mean;
                --left;
            }
        }
    }
    const double longest = *std::max_element(times.begin(), times.end());
    const auto is_last = [&](double time) { return time >= kLast * longest; };
    const auto num_last = static_cast<size_t>(std::count_if(times.begin(), times.end(), is_last));
    const double own = std::max(0.0, batch_ms - single_ms) / static_cast<double>(count - 1);
    const double shared = std::max(0.0, single_ms - own);
    const double total = static_cast<double>(count) * own + shared;
    if (num_last == count || total <= 0.0) return;
    const double scale = static_cast<double>(count) / total;
    for (size_t i = 0; i < count; ++i) {
        weights[i] = scale * (own + (is_last(times[i]) ? shared / static_cast<double>(num_last) : 0.0));
    }
}

}  // namespace deepinfer
