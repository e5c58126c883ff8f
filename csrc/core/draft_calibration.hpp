/// DraftCalibration: what became of drafts, by position in their block. Corrects the drafter's confidences
/// while running, and keeps a reliability table of them.
///
/// A confidence estimates the probability that a draft stands if those before it do. The correction
/// multiplies its odds by one factor per position, the one with which mean confidence and acceptance agree:
/// an online Newton step of the logistic intercept per outcome, old outcomes fading. The factor only moves
/// confidences within (0, 1), so survivals, their products, never increase with the position.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "types.hpp"

namespace deepinfer {

/// Survival estimates of the drafter against what came true; `kBins` equal bins of [0, 1] per position.
struct Reliability {
    static constexpr int32_t kBins = 20;

    std::vector<int64_t> count;     // [num_positions, kBins] blocks
    std::vector<double> survival;   // [num_positions, kBins] sum of the estimates
    std::vector<int64_t> accepted;  // [num_positions, kBins] blocks whose drafts up to the position all stood
};

class DraftCalibration {
public:
    explicit DraftCalibration(int32_t num_positions);

    /// The drafts before `position` stood; whether this one did. A confidence of 0 is no estimate: it marks
    /// drafts behind an expected end, and nothing is learnt.
    void add_outcome(int32_t position, float confidence, bool is_accepted);
    /// Of a block with these raw confidences the first `num_known` prefixes have a known outcome, of which
    /// `num_accepted` stood.
    void add_block(std::span<const float> confidences, int32_t num_known, int32_t num_accepted);

    /// The confidence as experience corrects it; 0 stays 0.
    float corrected(int32_t position, float confidence) const;
    /// Share of the drafts at `position` that stood if those before them did; 1 before enough are known.
    float acceptance(int32_t position) const;
    /// [num_positions] factor of the odds; 1 before enough outcomes are known.
    const std::vector<float>& odds() const { return odds_; }
    /// [num_positions] outcomes learnt from.
    std::vector<int64_t> num_outcomes() const;

    const Reliability& reliability() const { return reliability_; }
    void reset_reliability();

private:
    static constexpr int64_t kMinOutcomes = 64;
    static constexpr double kKeep = 1.0 - 1.0 / 2000;  ///< weight of an outcome after the next one
    static constexpr double kPrior = 8.0;              ///< curvature that damps the first steps
    static constexpr double kMaxShift = 8.0;           ///< of the logit

    struct Position {
        double shift = 0.0;      ///< of the logit
        double curvature = 0.0;  ///< faded sum of c (1 - c)
        double weight = 0.0;     ///< faded number of outcomes
        double accepted = 0.0;   ///< faded number of accepted ones
        int64_t num_outcomes = 0;
    };

    std::vector<Position> positions_;
    std::vector<float> odds_;
    Reliability reliability_;
};

}  // namespace deepinfer
