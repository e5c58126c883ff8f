/// Reference-counted pool of ids, used for KV blocks and for state slots. It knows nothing of sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace deepinfer {

/// Reference-counted pool of KV blocks (or state slots). Id 0 is never handed out: padding points at it.
///
/// The free list is a ring: ids are taken from its head and return to its tail, so a returned id rests as
/// long as possible before somebody writes to it again.
class BlockPool {
public:
    /// A pool of ids 1 .. num_blocks - 1.
    explicit BlockPool(int32_t num_blocks);

    /// Takes a free block with one holder; the caller has checked `num_free()`.
    int32_t allocate();
    /// Takes `count` free blocks and appends them to `table`.
    void allocate(int32_t count, std::vector<int32_t>& table);
    /// Adds a holder.
    void share(int32_t block);
    /// Drops a holder; the last one returns the block.
    void release(int32_t block);
    /// Drops the blocks of `table` behind its first `keep`, last block first.
    void release_tail(std::vector<int32_t>& table, int32_t keep);

    int32_t num_blocks() const { return static_cast<int32_t>(ref_counts_.size()); }
    int32_t num_free() const { return num_free_; }
    int32_t ref_count(int32_t block) const;
    /// Blocks of `table` that would come free if its holder let go.
    int32_t num_exclusive(std::span<const int32_t> table) const;
    /// The free ids, next one first.
    std::vector<int32_t> free_ids() const;

private:
    std::vector<int32_t> ref_counts_;  // [num_blocks]
    std::vector<int32_t> free_ring_;   // [num_blocks - 1]
    int32_t head_ = 0;
    int32_t num_free_ = 0;
};

}  // namespace deepinfer
