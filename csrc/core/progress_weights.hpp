/// What a token of each running sequence is worth to the time until all of them are done.
///
/// Tokens per time is the wrong aim at the end of a batch. A plain step of n sequences takes about a + b n:
/// once nothing waits, every token saves the b of its own row, but the a of a step is saved only by those who
/// would be running last. Drafts of easy sequences then buy little, and the steps that they prolong hold up
/// the hard ones, which end alone, at the price of a whole step for each token.
///
/// With t the steps that a sequence still needs (tokens left, by the tokens per step that its drafts have
/// brought so far), those with t >= 0.8 max t share the a; weights are scaled to a mean of 1, so that a plain
/// step is worth one token for each sequence whatever they are. Where as many wait as run, whoever ends makes
/// room for another one, and all weights are 1; fewer of them go to the sequences that end first, as list
/// scheduling would have it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace deepinfer {

/// A running sequence.
struct Progress {
    int32_t tokens_left;     ///< at most, at least 1
    double tokens_per_step;  ///< with its drafts, at least 1
};

/// Replaces `weights` by one for each sequence.
///
///   num_waiting: sequences that wait for a place.
///   single_ms, batch_ms: a plain step of one sequence, and of all of them.
void weigh_progress(std::span<const Progress> sequences, int32_t num_waiting, double single_ms,
                    double batch_ms, std::vector<double>& weights);

}  // namespace deepinfer
