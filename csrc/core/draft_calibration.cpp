#include "draft_calibration.hpp"

#include <algorithm>
#include <cmath>

namespace deepinfer {
namespace {

/// Confidences are kept off 0 and 1, where no factor of the odds moves them.
constexpr double kEdge = 1e-3;

double with_odds(double confidence, double odds) {
    const double c = std::clamp(confidence, kEdge, 1.0 - kEdge);
    return odds * c / (1.0 - c + odds * c);
}

}  // namespace

DraftCalibration::DraftCalibration(int32_t num_positions)
    : positions_(static_cast<size_t>(num_positions)), odds_(static_cast<size_t>(num_positions), 1.0f) {
    reset_reliability();
}

void DraftCalibration::add_outcome(int32_t position, float confidence, bool is_accepted) {
    if (!(confidence > 0.0f)) return;
    Position& p = positions_[static_cast<size_t>(position)];
    const double expected = with_odds(confidence, std::exp(p.shift));
    p.curvature = kKeep * p.curvature + expected * (1.0 - expected);
    p.weight = kKeep * p.weight + 1.0;
    p.accepted = kKeep * p.accepted + (is_accepted ? 1.0 : 0.0);
    p.shift += ((is_accepted ? 1.0 : 0.0) - expected) / (p.curvature + kPrior);
    p.shift = std::clamp(p.shift, -kMaxShift, kMaxShift);
    ++p.num_outcomes;
    if (p.num_outcomes >= kMinOutcomes)
        odds_[static_cast<size_t>(position)] = static_cast<float>(std::exp(p.shift));
}

void DraftCalibration::add_block(std::span<const float> confidences, int32_t num_known,
                                 int32_t num_accepted) {
    double survival = 1.0;
    for (int32_t j = 0; j < num_known; ++j) {
        survival *= std::clamp(double(confidences[static_cast<size_t>(j)]), 0.0, 1.0);
        const int32_t bin =
            std::min(static_cast<int32_t>(survival * Reliability::kBins), Reliability::kBins - 1);
        const size_t cell = static_cast<size_t>(j * Reliability::kBins + bin);
        ++reliability_.count[cell];
        reliability_.survival[cell] += survival;
        if (j < num_accepted) ++reliability_.accepted[cell];
    }
}

float DraftCalibration::corrected(int32_t position, float confidence) const {
    if (!(confidence > 0.0f)) return 0.0f;
    const float odds = odds_[static_cast<size_t>(position)];
    if (odds == 1.0f) return std::min(confidence, 1.0f);
    return static_cast<float>(with_odds(confidence, odds));
}

float DraftCalibration::acceptance(int32_t position) const {
    const Position& p = positions_[static_cast<size_t>(position)];
    return p.num_outcomes < kMinOutcomes ? 1.0f : static_cast<float>(p.accepted / p.weight);
}

std::vector<int64_t> DraftCalibration::num_outcomes() const {
    std::vector<int64_t> counts;
    for (const Position& position : positions_) counts.push_back(position.num_outcomes);
    return counts;
}

void DraftCalibration::reset_reliability() {
    const size_t cells = positions_.size() * Reliability::kBins;
    reliability_.count.assign(cells, 0);
    reliability_.survival.assign(cells, 0.0);
    reliability_.accepted.assign(cells, 0);
}

}  // namespace deepinfer
