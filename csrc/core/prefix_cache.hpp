/// Prefix cache: which full blocks hold the KV of which tokens, and at which borders a state is kept.
///
/// A *border* is a multiple of the block size. To resume at one a sequence needs the blocks in front of it,
/// which it shares, and the state of every ring there, which it copies from a *snapshot*: a slot of the state
/// pool that belongs to no sequence. Known blocks form a tree, one node per block:
///
///     root - [tokens 0..127 | block 7] - [128..255 | block 9 | snapshot 31] - [256..383 | block 4]
///                                      \ [128..255, other tokens | block 12]
///
/// A node is found by a chained hash and proved by its own tokens, content keys and parent, so two prefixes
/// are never taken for one. Blocks and snapshots that nobody holds stay in their pools' cached lists; what is
/// taken from there, the least recently used first, is forgotten here with everything behind it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_pool.hpp"
#include "config.hpp"
#include "prefix_hash.hpp"
#include "sequence.hpp"

namespace deepinfer {

/// What the cache knows of a sequence's tokens. It holds until blocks or slots are taken.
struct PrefixHit {
    int32_t num_tokens = 0;       ///< the border to resume from; 0: none
    int32_t num_known = 0;        ///< tokens in known blocks, with a state behind them or not
    int32_t snapshot = 0;         ///< slot of the state at `num_tokens`
    std::vector<int32_t> blocks;  // [num_tokens / block_size]
};

/// A border whose state has become known, with all that a store outside would keep of it.
struct PublishedBorder {
    std::vector<int32_t> tokens;  // [border]
    std::vector<int32_t> blocks;  // [border / block_size]
    int32_t snapshot = 0;
    bool is_whole = true;  ///< false: bounded replay has cut its decoder windows
};

/// What is held for a prefix that comes from outside, until it is published or cancelled.
struct PrefixReservation {
    int32_t num_known = 0;        ///< leading blocks that are known already
    std::vector<int32_t> blocks;  // [border / block_size]
    int32_t snapshot = 0;
};

/// Totals since the start, but for the two sizes.
struct PrefixCacheStats {
    int64_t num_queries = 0;       ///< admissions that were looked up
    int64_t num_hits = 0;          ///< of these, how many resumed from a snapshot
    int64_t num_query_tokens = 0;  ///< tokens of the admissions, forks included
    int64_t num_hit_tokens = 0;    ///< of these, how many were not computed
    int64_t num_forks = 0;         ///< admissions that took everything from an equal prompt beside them
    int64_t num_evicted_blocks = 0;
    int64_t num_evicted_snapshots = 0;
    int64_t num_passed = 0;     ///< snapshots that decode steps have left
    int32_t num_blocks = 0;     ///< known now
    int32_t num_snapshots = 0;  ///< kept now
};

class PrefixCache {
public:
    PrefixCache(const CoreConfig& config, BlockPool& blocks, BlockPool& slots);

    bool is_enabled() const { return is_enabled_; }

    /// The longest border below the sequence's last token from which it can resume.
    PrefixHit find(Sequence& sequence) const;
    /// Takes a hit's blocks, from now on held by the caller, and marks its snapshot as used.
    void take(const PrefixHit& hit);
    /// Hash of the tokens up to the end of a full block.
    PrefixHash hash_of(Sequence& sequence, int32_t index) const;
    /// Hash of all tokens of a sequence.
    PrefixHash key_of(Sequence& sequence) const;
    /// Whether two sequences compute the same from the same tokens, and may share it.
    bool may_share(const Sequence& one, const Sequence& other) const;

    /// The first `num_tokens` tokens of a sequence are computed: its full blocks are known from now on.
    void publish(Sequence& sequence, int32_t num_tokens);
    /// `slot`, held by the caller, is the state at `border`; it is kept or given back. Of the borders that a
    /// sequence passes while it decodes (`is_passing`) only the newest one's stays.
    void publish_snapshot(Sequence& sequence, int32_t border, int32_t slot, bool is_passing);
    /// Something is wrong with what a sequence computed: forgets its blocks.
    void retract(const Sequence& sequence);

    /// From now on borders that become known are listed.
    void start_reporting() { is_reporting_ = is_enabled_; }
    /// Borders that have become known since the last call; their blocks and snapshots are as they were until
    /// the next blocks or slots are taken.
    std::vector<PublishedBorder> take_published();
    bool is_reporting() const { return is_reporting_; }
    /// Whether a sequence's prefix is one that others outside may have: not private and not scored.
    bool may_exchange(const Sequence& sequence) const;
    /// Holds what the first `border` tokens of a sequence need, beyond what is known; nothing when that does
    /// not fit, or is there.
    std::optional<PrefixReservation> reserve(Sequence& sequence, int32_t border);
    /// The reserved blocks and the snapshot are known from now on. They stay held until `settle`: their bytes
    /// are on the way, in front of whatever reads them, and nobody has proved them.
    int64_t publish(Sequence& sequence, const PrefixReservation& reservation);
    /// Ends a publication. One that is not sound is forgotten and returned: blocks behind the known ones, and
    /// the slot, hold nonsense.
    std::optional<PrefixReservation> settle(int64_t publication, bool is_sound);
    void cancel(const PrefixReservation& reservation);
    /// Publications that are not settled.
    const std::map<int64_t, PrefixReservation>& unproved() const { return unproved_; }

    /// Takes a free block or slot, evicting what was used longest ago when no plain one is left.
    int32_t take_block();
    int32_t take_slot();

    /// Forgets everything; hashes start from another salt.
    void reset();

    void count_query(const Sequence& sequence, int32_t num_hit_tokens);
    void count_fork(const Sequence& sequence);
    PrefixCacheStats stats() const;
    /// Throws `InternalError` naming the first inconsistency. O(blocks + slots).
    void check() const;

private:
    struct Node {
        PrefixHash hash;
        std::string content;       ///< see `content_of`
        int32_t window_start = 0;  ///< with bounded replay: a state is that of windows that begin here
        int64_t serial = 0;  ///< 0: not in use
        int32_t parent = 0;  ///< 0: the root
        int32_t first_child = 0, next_sibling = 0, previous_sibling = 0;
        int32_t snapshot = 0;  ///< 0: none
        bool is_passing = false;  ///< a decode step has left it
    };

    std::span<const int32_t> tokens_of(const Sequence& sequence, int32_t index) const;
    std::string content_of(const Sequence& sequence, int32_t index) const;
    bool has_content(const Node& node, const Sequence& sequence, int32_t index) const;
    int32_t find_child(int32_t parent, Sequence& sequence, int32_t index) const;
    void keep_snapshot(int32_t node, int32_t slot);
    void drop_snapshot(int32_t node);
    void report(int32_t node);
    void insert(int32_t block, int32_t parent, Sequence& sequence, int32_t index);
    void remove_with_children(int32_t block);
    void remove(int32_t block);

    BlockPool& blocks_;
    BlockPool& slots_;
    const bool is_enabled_;
    const int32_t block_size_;
    const int32_t hash_bits_;
    const int32_t replay_keep_tokens_;
    PrefixHash root_;
    uint64_t epoch_ = 0;
    int64_t next_serial_ = 1;
    std::vector<Node> nodes_;      // [num_blocks] by block id; the root's children hang on id 0
    std::vector<int32_t> tokens_;  // [num_blocks, block_size] of the nodes
    std::vector<int32_t> owners_;  // [num_state_slots] block whose border a snapshot belongs to; 0: none
    std::unordered_map<PrefixHash, int32_t> index_;
    bool is_reporting_ = false;
    std::vector<PublishedBorder> published_;
    std::map<int64_t, PrefixReservation> unproved_;  // by publication
    int64_t next_publication_ = 1;
    PrefixCacheStats stats_;
};

}  // namespace deepinfer
