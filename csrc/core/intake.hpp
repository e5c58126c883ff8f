/// What may enter the core: checks of one request, and the sequence that comes out of it.
#pragma once

#include <span>

#include "config.hpp"
#include "sequence.hpp"

namespace deepinfer {

/// Throws `std::invalid_argument` with the numbers and what would work when the request can never run.
/// `num_ids` is the size of the vocabulary, 0 when unknown.
void check_request(const CoreConfig& config, const SequenceParams& params, std::span<const int32_t> prompt,
                   int32_t num_ids);

/// Fills a fresh sequence from a checked request.
void prepare_sequence(const CoreConfig& config, SequenceParams params, std::span<const int32_t> prompt,
                      Sequence& sequence);

/// The same for a sequence that another engine has begun.
void check_computed(const CoreConfig& config, const SequenceParams& params, const ComputedSequence& computed,
                    int32_t num_ids);
void prepare_computed(const CoreConfig& config, SequenceParams params, ComputedSequence&& computed,
                      Sequence& sequence);

}  // namespace deepinfer
