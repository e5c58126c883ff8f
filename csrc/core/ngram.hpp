/// N-gram windows over compressed token ids: entry r of the window at position p is the token at p - r.
///
/// The start of the sequence and image tokens are barriers: from there on backwards the window holds the pad
/// id.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "batch_inputs.hpp"

namespace deepinfer {

/// Writes `width` entries of the window at `position` of `tokens`. Positions behind the end of `tokens` are
/// barriers.
inline void fill_window(const CoreConfig& config, const CompressedVocab& vocab,
                        std::span<const int32_t> tokens, int32_t position, int32_t width, int32_t* out) {
    int32_t r = 0;
    if (position < static_cast<int32_t>(tokens.size())) {
        for (; r < width && position - r >= 0; ++r) {
            const int32_t id = tokens[position - r];
            if (config.is_image_token(id)) break;
            out[r] = vocab(id);
        }
    }
    for (; r < width; ++r) out[r] = vocab.pad_id;
}

}  // namespace deepinfer
