/// Per-sequence arrays of the forward: lengths, slots and block tables.
#pragma once

#include "batch_inputs.hpp"

namespace deepinfer {

void add_kv_layout(const StepPlan& plan, Layout& layout);
void fill_kv_inputs(const CoreConfig& config, const StepPlan& plan, BufferWriter& writer);

}  // namespace deepinfer
