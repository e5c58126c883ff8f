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
        bool is_admission;     ///< it takes its slot and blocks with this chunk
        PrefixHit hit;         ///< what it then need not compute
        int32_t state_border;  ///< the next border at which its state is kept; 0: none
        bool is_cut = false;   ///< the border is there because another prompt parts from it there
    };
    /// A sequence that is admitted without rows of its own, as a copy of an equal one.
    struct Fork {
        Sequence* sequence;
        Sequence* leader;  ///< its prompt ends in this step
    };
    std::vector<Chunk> chunks;
    std::vector<Fork> forks;
    std::vector<Sequence*> passed;  ///< did not fit while a later one was admitted, once per later one
};

/// Chooses in arrival order under the budgets of the configuration; changes nothing.
///
/// A sequence that does not fit now (blocks, slots) does not stop later ones, until `max_overtakes` of them
/// have passed it. Token, length and FLOPs budgets are whole again in the next step and need no such bound:
/// whoever is first then always fits. Nothing is admitted into the room that running sequences need for their
/// next `admission_headroom_tokens` tokens, unless nobody else holds a block.
///
/// With a prefix cache an admission starts behind what is known of its tokens, a chunk ends where the state
/// is to be kept, and a sequence whose tokens are those of one that is being prefilled waits for it and is
/// forked. One that only begins like it waits until the other's state at a common border is kept, and resumes
/// there; the chunk of a sequence that is admitted in the same step is cut at the last of these borders.
/// Nobody waits longer than it takes the other to get there, and that one is not waiting.
PrefillChoice choose_prefill(const CoreState& state);

/// Waiting sequences whose bytes somebody outside holds and for which there is room, by the same rules: those
/// that were swapped out here, or those that another engine has begun.
/// Whoever waits in front of one counts it as an overtaking.
std::vector<Sequence*> choose_computed(CoreState& state, bool is_swapped);

}  // namespace deepinfer
