/// Which waiting sequences a prefill step takes, and how much of each prompt.
#pragma once

#include <cstdint>
#include <vector>

#include "core_state.hpp"

namespace deepinfer {

struct PrefillChoice {
    struct Chunk {
        Sequence* sequence;
        int32_t start;
        int32_t num_rows;
        bool is_admission;  ///< it takes its slot and blocks with this chunk
    };
    std::vector<Chunk> chunks;
    std::vector<Sequence*> passed;  ///< did not fit while a later one was admitted, once per later one
};

/// Chooses in arrival order under the budgets of the configuration; changes nothing.
///
/// A sequence that does not fit now (blocks, slots) does not stop later ones, until `max_overtakes` of them
/// have passed it. Token, length and FLOPs budgets are whole again in the next step and need no such bound:
/// whoever is first then always fits. Nothing is admitted into the room that running sequences need for their
/// next `admission_headroom_tokens` tokens, unless nobody else holds a block.
PrefillChoice choose_prefill(const CoreState& state);

}  // namespace deepinfer
