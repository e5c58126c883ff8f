/// The doors of the prefix cache for a store outside: borders that have become known, and prefixes that come
/// from there. Blocks and slot of the latter are reserved, filled by whoever knows the bytes, and published.
#include <algorithm>

#include "check.hpp"
#include "prefix_cache.hpp"

namespace deepinfer {

std::vector<PublishedBorder> PrefixCache::take_published() { return std::exchange(published_, {}); }

void PrefixCache::report(int32_t node) {
    // Private prefixes and windows that replay has cut stay inside.
    if (!is_reporting_ || nodes_[node].window_start != 0) return;
    PublishedBorder border;
    border.snapshot = nodes_[node].snapshot;
    for (int32_t block = node; block != 0; block = nodes_[block].parent) {
        if (!nodes_[block].content.empty()) return;
        border.blocks.push_back(block);
    }
    std::reverse(border.blocks.begin(), border.blocks.end());
    for (const int32_t block : border.blocks) {
        const auto begin = tokens_.begin() + int64_t{block} * block_size_;
        border.tokens.insert(border.tokens.end(), begin, begin + block_size_);
    }
    published_.push_back(std::move(border));
}

bool PrefixCache::may_exchange(const Sequence& sequence) const {
    return is_enabled_ && !sequence.still_scores() && sequence.params.content_keys.empty() &&
           sequence.replay_start(replay_keep_tokens_) == 0;
}

std::optional<PrefixReservation> PrefixCache::reserve(Sequence& sequence, int32_t border) {
    const int32_t num_blocks = border / block_size_;
    DI_CHECK(is_enabled_ && border % block_size_ == 0 && border > 0 && border < sequence.length(),
             "border=", border, " length=", sequence.length());
    PrefixReservation reservation;
    std::vector<int32_t>& blocks = reservation.blocks;
    for (int32_t index = 0, parent = 0; index < num_blocks; ++index) {
        parent = find_child(parent, sequence, index);
        if (parent == 0) break;
        blocks.push_back(parent);
    }
    reservation.num_known = static_cast<int32_t>(blocks.size());
    const int32_t missing = num_blocks - reservation.num_known;
    // A state that is there already would be in the way of the new one.
    const bool is_there = missing == 0 && nodes_[blocks.back()].snapshot != 0;
    if (is_there || missing > blocks_.num_free() - blocks_.num_unheld(blocks) || slots_.num_free() == 0) {
        return std::nullopt;
    }
    for (const int32_t block : blocks) blocks_.share(block);
    for (int32_t index = 0; index < missing; ++index) blocks.push_back(take_block());
    reservation.snapshot = take_slot();
    return reservation;
}

void PrefixCache::publish(Sequence& sequence, const PrefixReservation& reservation) {
    const std::vector<int32_t>& blocks = reservation.blocks;
    int32_t parent = 0;
    bool is_whole = true;
    for (int32_t index = 0; index < static_cast<int32_t>(blocks.size()); ++index) {
        if (index >= reservation.num_known) {
            is_whole = !index_.contains(hash_of(sequence, index));  // else another prefix has this hash
            if (!is_whole) break;
            insert(blocks[index], parent, sequence, index);
        }
        parent = blocks[index];
    }
    if (is_whole) keep_snapshot(parent, reservation.snapshot);
    cancel(reservation);
}

void PrefixCache::cancel(const PrefixReservation& reservation) {
    slots_.release(reservation.snapshot);
    std::vector<int32_t> blocks = reservation.blocks;
    blocks_.release_tail(blocks, 0);
}

}  // namespace deepinfer
