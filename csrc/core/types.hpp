/// Enums that the core shares with Python. Integer values are part of the interface.
#pragma once

#include <cstdint>

namespace deepinfer {

/// Which phases an engine runs.
enum class Role : uint8_t { kNormal = 0, kPrompt = 1, kCompletion = 2 };

/// A step is entirely one or entirely the other.
enum class StepKind : uint8_t { kDecode = 0, kPrefill = 1 };

enum class SequenceStatus : uint8_t { kWaiting = 0, kRunning = 1, kFinished = 2 };

/// With `kHandOff` a sequence keeps its blocks and slot until it is released: another engine goes on with it.
enum class FinishReason : uint8_t { kNone = 0, kStop = 1, kLength = 2, kAbort = 3, kError = 4, kHandOff = 5 };

/// Why a sequence ended with `FinishReason::kError`; rows of a step report the same values.
enum class ErrorKind : uint8_t {
    kNone = 0,
    kNumerics = 1,   ///< the model produced NaN, +inf or nothing finite
    kMasked = 2,     ///< every token was masked
    kGrammar = 3,    ///< the structured-output matcher failed
    kImage = 4,      ///< the image could not be processed
    kPreempted = 5,  ///< preempted while recomputation is switched off
    kInternal = 6,
};

/// What becomes of the bytes of a preempted sequence (see swap_pool.hpp).
enum class PreemptionMode : uint8_t { kRecompute = 0, kSwap = 1, kAuto = 2 };

/// Most drafts that a sequence can hold; `CoreConfig::num_draft_tokens` may not exceed it.
inline constexpr int32_t kMaxDrafts = 16;

/// Log-probability of what cannot occur, such as an image token in a prompt.
inline constexpr float kLogprobFloor = -9999.0f;

/// Ceiling of a / b for a >= 0, b > 0.
constexpr int32_t div_up(int32_t a, int32_t b) { return static_cast<int32_t>((int64_t{a} + b - 1) / b); }

}  // namespace deepinfer
