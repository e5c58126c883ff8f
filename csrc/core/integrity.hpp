/// Proof that no block or slot is lost or shared by mistake and that every sequence is where its state says.
#pragma once

#include "core_state.hpp"

namespace deepinfer {

/// Throws `InternalError` naming the first broken invariant. O(sequences + blocks).
void check_integrity(const CoreState& state);

}  // namespace deepinfer
