/// What a commit tells about drafts: follows blocks until it is known how many of their drafts stand.
#pragma once

#include <cstdint>

#include "draft_calibration.hpp"
#include "sequence.hpp"

namespace deepinfer {

/// Learns from a step of a sequence, after its tokens are appended and before new drafts are kept.
///
/// Coupled verification accepts a draft iff it is the token that plain decoding chooses, so also drafts that
/// nobody verified are labelled: by the tokens that come later. A block is followed from its proposal until
/// its first wrong draft, or the token behind its last one, over as many steps as that takes; then the next
/// one. When no draft is verified, blocks are thus the ones that full verification would have seen.
///
/// Ratio verification labels verified drafts only; of the reliability table it fills in whole blocks.
///
/// `num_new` tokens were appended, `num_verified` drafts had a row, `num_emitted` rows counted.
void learn_from_step(Sequence& sequence, int32_t num_new, int32_t num_verified, int32_t num_emitted,
                     DraftCalibration& calibration);

}  // namespace deepinfer
