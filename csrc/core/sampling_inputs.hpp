/// Builder of the sampler's inputs; names and meanings are those of deepinfer/sampling/inputs.py.
///
/// One sampling row per output row of the plan. Rows are built from the committed state of their sequence, so
/// in asynchronous scheduling the plan before must be committed first.
#pragma once

#include "batch_inputs.hpp"

namespace deepinfer {

/// Collects the sparse arrays into the plan and says where everything goes.
Layout sampling_layout(StepPlan& plan);
void fill_sampling(const CoreConfig& config, StepPlan& plan, std::span<std::byte> buffer);

}  // namespace deepinfer
