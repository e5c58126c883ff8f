/// Reference-counted pool of ids, used for KV blocks and for state slots. It knows nothing of sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace deepinfer {

/// Reference-counted pool of KV blocks (or state slots). Id 0 is never handed out: padding points at it.
///
/// Free ids wait in two lists. *Plain* ones are a ring: ids are taken from its head and return to its tail,
/// so a returned id rests as long as possible before somebody writes to it again. *Cached* ones are free to
/// take as well, but somebody still knows what they hold (`keep`); they are ordered by last use, and whoever
/// takes one tells its knower first (`oldest_cached`, `forget`).
class BlockPool {
public:
    /// A pool of ids 1 .. num_blocks - 1.
    explicit BlockPool(int32_t num_blocks);

    /// Takes a plain free block with one holder; the caller has checked `num_plain()`.
    int32_t allocate();
    /// Adds a holder; a cached block may have had none.
    void share(int32_t block);
    /// Drops a holder; the last one returns the block.
    void release(int32_t block);
    /// Drops the blocks of `table` behind its first `keep`, last block first.
    void release_tail(std::vector<int32_t>& table, int32_t keep);

    /// What the block holds is known from now on: once free it is cached, not plain.
    void keep(int32_t block);
    /// What the block holds is not known any more.
    void forget(int32_t block);
    /// A cached block without a holder was used: it becomes the newest.
    void touch(int32_t block);

    int32_t num_blocks() const { return static_cast<int32_t>(ref_counts_.size()); }
    int32_t num_free() const { return num_plain_ + num_cached_; }
    int32_t num_plain() const { return num_plain_; }
    int32_t num_cached() const { return num_cached_; }
    /// The cached block without a holder whose last use is longest ago; 0 when there is none.
    int32_t oldest_cached() const { return links_[0].next; }
    int32_t ref_count(int32_t block) const;
    bool is_kept(int32_t block) const { return is_kept_[block] != 0; }
    /// Blocks of `table` that would come free if its holder let go.
    int32_t num_exclusive(std::span<const int32_t> table) const;
    /// Blocks of `table` that nobody holds.
    int32_t num_unheld(std::span<const int32_t> table) const;
    /// The free ids, next one first: plain ones, then cached ones.
    std::vector<int32_t> free_ids() const;

private:
    struct Link {
        int32_t previous = 0, next = 0;
    };

    void add_plain(int32_t block);
    void add_cached(int32_t block);
    void remove_cached(int32_t block);

    std::vector<int32_t> ref_counts_;  // [num_blocks]
    std::vector<int32_t> free_ring_;   // [num_blocks - 1]
    std::vector<uint8_t> is_kept_;     // [num_blocks]
    std::vector<Link> links_;          // [num_blocks] cached ones, oldest first, in a circle through id 0
    int32_t head_ = 0;
    int32_t num_plain_ = 0;
    int32_t num_cached_ = 0;
};

}  // namespace deepinfer
