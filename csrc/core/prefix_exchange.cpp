/// The doors of the prefix cache for a store outside: borders that have become known, and prefixes that come
/// from there. Blocks and slot of the latter are reserved and published by whoever is about to fill them, and
/// settled when that has been done, or has failed.
#include <algorithm>

#include "check.hpp"
#include "prefix_cache.hpp"

namespace deepinfer {

std::vector<PublishedBorder> PrefixCache::take_published() { return std::exchange(published_, {}); }

void PrefixCache::report(int32_t node) {
    if (!is_reporting_) return;
    PublishedBorder border;
    border.snapshot = nodes_[node].snapshot;
    border.is_whole = nodes_[node].window_start == 0;
    for (int32_t block = node; block != 0; block = nodes_[block].parent) {
        if (!nodes_[block].content.empty()) return;  // private prefixes stay inside
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
    return is_enabled_ && !sequence.still_scores() && sequence.params.content_keys.empty();
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

int64_t PrefixCache::publish(Sequence& sequence, const PrefixReservation& reservation) {
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
    unproved_.emplace(next_publication_, reservation);
    return next_publication_++;
}

std::optional<PrefixReservation> PrefixCache::settle(int64_t publication, bool is_sound) {
    const auto found = unproved_.find(publication);
    if (found == unproved_.end()) return std::nullopt;
    PrefixReservation reservation = std::move(found->second);
    unproved_.erase(found);
    if (!is_sound) {
        for (size_t i = static_cast<size_t>(reservation.num_known); i < reservation.blocks.size(); ++i) {
            if (nodes_[reservation.blocks[i]].serial != 0) remove_with_children(reservation.blocks[i]);
        }
        const int32_t owner = owners_[reservation.snapshot];
        if (owner != 0) drop_snapshot(owner);  // behind blocks that were known before, which stay
    }
    cancel(reservation);
    if (is_sound) return std::nullopt;
    return reservation;
}

void PrefixCache::cancel(const PrefixReservation& reservation) {
    slots_.release(reservation.snapshot);
    std::vector<int32_t> blocks = reservation.blocks;
    blocks_.release_tail(blocks, 0);
}

}  // namespace deepinfer
