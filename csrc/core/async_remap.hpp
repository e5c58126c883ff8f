/// What a device needs to correct a step that was planned while the one before it was still running.
#pragma once

#include "batch_inputs.hpp"

namespace deepinfer {

/// Empty arrays unless the engine schedules asynchronously; limits and odds only where rows may be dealt
/// anew.
void add_remap_layout(const CoreConfig& config, const StepPlan& plan, Layout& layout);
void fill_remap_inputs(const CoreConfig& config, const CompressedVocab& vocab, const StepPlan& plan,
                       BufferWriter& writer);

}  // namespace deepinfer
