#include "prefix_cache.hpp"

#include <algorithm>

#include "check.hpp"

namespace deepinfer {

PrefixCache::PrefixCache(const CoreConfig& config, BlockPool& blocks, BlockPool& slots)
    : blocks_(blocks),
      slots_(slots),
      is_enabled_(config.prefix_caching),
      block_size_(config.block_size),
      hash_bits_(config.prefix_hash_bits),
      replay_keep_tokens_(config.replay_keep_tokens),
      root_{config.prefix_salt, 0} {
    if (!is_enabled_) return;
    nodes_.resize(static_cast<size_t>(config.num_blocks));
    tokens_.resize(static_cast<size_t>(config.num_blocks) * static_cast<size_t>(block_size_));
    owners_.resize(static_cast<size_t>(config.num_state_slots));
}

PrefixHit PrefixCache::find(Sequence& sequence) const {
    PrefixHit hit;
    if (!is_enabled_ || sequence.still_scores()) return hit;
    const int32_t most = (sequence.length() - 1) / block_size_;
    int32_t block = 0;
    size_t used = 0;
    for (int32_t index = 0; index < most && nodes_[block].first_child != 0; ++index) {
        block = find_child(block, sequence, index);
        if (block == 0) break;
        hit.blocks.push_back(block);
        if (nodes_[block].snapshot == 0) continue;
        hit.snapshot = nodes_[block].snapshot;
        used = hit.blocks.size();
    }
    hit.num_known = static_cast<int32_t>(hit.blocks.size()) * block_size_;
    hit.num_tokens = static_cast<int32_t>(used) * block_size_;
    hit.blocks.resize(used);
    return hit;
}

void PrefixCache::take(const PrefixHit& hit) {
    for (const int32_t block : hit.blocks) blocks_.share(block);
    // One that is held is on its way from a store.
    if (hit.snapshot != 0 && slots_.ref_count(hit.snapshot) == 0) slots_.touch(hit.snapshot);
}

PrefixHash PrefixCache::key_of(Sequence& sequence) const {
    PrefixKeys& keys = sequence.prefix.keys;
    if (keys.whole_length != sequence.length()) {
        const int32_t full = sequence.length() / block_size_;
        PrefixHash front = full > 0 ? hash_of(sequence, full - 1) : root_.extend({}, hash_bits_);
        const std::string content = content_of(sequence, full);
        if (!content.empty()) front = front.extend(content);
        const std::span<const int32_t> rest =
            std::span(sequence.tokens).subspan(static_cast<size_t>(full) * static_cast<size_t>(block_size_));
        keys.whole = front.extend(rest, hash_bits_);
        keys.whole_length = sequence.length();
    }
    return keys.whole;
}

bool PrefixCache::may_share(const Sequence& one, const Sequence& other) const {
    return one.params.content_keys == other.params.content_keys &&
           one.replay_start(replay_keep_tokens_) == other.replay_start(replay_keep_tokens_);
}

void PrefixCache::publish(Sequence& sequence, int32_t num_tokens) {
    PublishedPrefix& prefix = sequence.prefix;
    if (!is_enabled_) return;
    const int32_t full = num_tokens / block_size_;
    sequence.publish_at = (full + 1) * block_size_;
    if (full <= prefix.num_published) return;
    int32_t parent = prefix.node;
    int32_t index = prefix.num_published;
    if (parent != 0 && nodes_[parent].serial != prefix.serial) parent = index = 0;  // evicted meanwhile
    for (; index < full; ++index) {
        int32_t block = find_child(parent, sequence, index);
        if (block == 0) {
            if (index_.contains(hash_of(sequence, index))) break;  // another prefix of this hash came first
            block = sequence.blocks[index];
            insert(block, parent, sequence, index);
        }
        parent = block;
    }
    prefix = {std::move(prefix.keys), index, parent, parent == 0 ? 0 : nodes_[parent].serial};
}

void PrefixCache::publish_snapshot(Sequence& sequence, int32_t border, int32_t slot, bool is_passing) {
    publish(sequence, border);
    const PublishedPrefix& prefix = sequence.prefix;
    int32_t node = prefix.node;
    if (node != 0 && nodes_[node].serial != prefix.serial) node = 0;
    for (int32_t behind = prefix.num_published - border / block_size_; node != 0 && behind > 0; --behind) {
        node = nodes_[node].parent;
    }
    const bool is_there = node != 0 && prefix.num_published >= border / block_size_;
    if (is_there && nodes_[node].snapshot == 0) {
        keep_snapshot(node, slot);
        report(node);
        if (is_passing) {
            nodes_[node].is_passing = true;
            ++stats_.num_passed;
            const int32_t parent = nodes_[node].parent;
            if (parent != 0 && nodes_[parent].is_passing) drop_snapshot(parent);
        }
    }
    slots_.release(slot);
}

void PrefixCache::drop_snapshot(int32_t node) {
    const int32_t slot = nodes_[node].snapshot;
    nodes_[node].snapshot = owners_[slot] = 0;
    nodes_[node].is_passing = false;
    slots_.forget(slot);
    --stats_.num_snapshots;
}

void PrefixCache::keep_snapshot(int32_t node, int32_t slot) {
    nodes_[node].snapshot = slot;
    owners_[slot] = node;
    slots_.keep(slot);
    ++stats_.num_snapshots;
}

void PrefixCache::retract(const Sequence& sequence) {
    if (!is_enabled_) return;
    for (const int32_t block : sequence.blocks) {
        if (nodes_[block].serial != 0) remove_with_children(block);
    }
}

int32_t PrefixCache::take_block() {
    if (blocks_.num_plain() == 0 && blocks_.num_cached() > 0) {
        const int32_t before = stats_.num_blocks;
        remove_with_children(blocks_.oldest_cached());
        stats_.num_evicted_blocks += before - stats_.num_blocks;
    }
    return blocks_.allocate();
}

int32_t PrefixCache::take_slot() {
    if (slots_.num_plain() == 0 && slots_.num_cached() > 0) {
        drop_snapshot(owners_[slots_.oldest_cached()]);
        ++stats_.num_evicted_snapshots;
    }
    return slots_.allocate();
}

void PrefixCache::reset() {
    if (!is_enabled_) return;
    while (nodes_[0].first_child != 0) remove_with_children(nodes_[0].first_child);
    root_.high = ++epoch_;
}

void PrefixCache::count_query(const Sequence& sequence, int32_t num_hit_tokens) {
    ++stats_.num_queries;
    stats_.num_hits += num_hit_tokens > 0 ? 1 : 0;
    stats_.num_query_tokens += sequence.length();
    stats_.num_hit_tokens += num_hit_tokens;
}

void PrefixCache::count_fork(const Sequence& sequence) {
    ++stats_.num_forks;
    stats_.num_query_tokens += sequence.length();
    stats_.num_hit_tokens += sequence.length() - 1;
}

PrefixCacheStats PrefixCache::stats() const { return stats_; }

void PrefixCache::check() const {
    if (!is_enabled_) return;
    int32_t num_nodes = 0, num_snapshots = 0;
    for (int32_t block = 1; block < blocks_.num_blocks(); ++block) {
        const Node& node = nodes_[block];
        DI_CHECK((node.serial != 0) == blocks_.is_kept(block), "block ", block, " serial=", node.serial,
                 " kept=", blocks_.is_kept(block));
        if (node.serial == 0) {
            DI_CHECK(node.snapshot == 0 && node.first_child == 0, "block ", block, " is unknown but linked");
            continue;
        }
        ++num_nodes;
        const auto found = index_.find(node.hash);
        DI_CHECK(found != index_.end() && found->second == block, "block ", block, " is not in the index");
        DI_CHECK(node.parent == 0 || nodes_[node.parent].serial != 0, "block ", block,
                 " has lost its parent ", node.parent);
        bool is_child = false;
        for (int32_t child = nodes_[node.parent].first_child; child != 0 && !is_child;
             child = nodes_[child].next_sibling) {
            is_child = child == block;
        }
        DI_CHECK(is_child, "block ", block, " is no child of ", node.parent);
        if (node.snapshot == 0) continue;
        ++num_snapshots;
        DI_CHECK(owners_[node.snapshot] == block, "snapshot ", node.snapshot, " of block ", block,
                 " belongs to ", owners_[node.snapshot]);
    }
    DI_CHECK(num_nodes == stats_.num_blocks && static_cast<size_t>(num_nodes) == index_.size(),
             "nodes=", num_nodes, " counted=", stats_.num_blocks, " indexed=", index_.size());
    int32_t num_owned = 0;
    for (int32_t slot = 1; slot < slots_.num_blocks(); ++slot) {
        DI_CHECK((owners_[slot] != 0) == slots_.is_kept(slot), "slot ", slot, " owner=", owners_[slot],
                 " kept=", slots_.is_kept(slot));
        if (owners_[slot] == 0) continue;
        ++num_owned;
        const auto is_it = [slot](const auto& entry) { return entry.second.snapshot == slot; };
        DI_CHECK(slots_.ref_count(slot) == std::count_if(unproved_.begin(), unproved_.end(), is_it),
                 "snapshot ", slot, " is held");
    }
    DI_CHECK(num_owned == num_snapshots && num_snapshots == stats_.num_snapshots, "snapshots=", num_snapshots,
             " owned=", num_owned, " counted=", stats_.num_snapshots);
}

PrefixHash PrefixCache::hash_of(Sequence& sequence, int32_t index) const {
    std::vector<PrefixHash>& hashes = sequence.prefix.keys.blocks;
    while (static_cast<int32_t>(hashes.size()) <= index) {
        // A salt is a token in front of the first one.
        const int32_t salt[] = {sequence.replay_start(replay_keep_tokens_)};
        PrefixHash front = hashes.empty() ? root_.extend(salt) : hashes.back();
        const int32_t next = static_cast<int32_t>(hashes.size());
        const std::string content = content_of(sequence, next);
        if (!content.empty()) front = front.extend(content);
        hashes.push_back(front.extend(tokens_of(sequence, next), hash_bits_));
    }
    return hashes[index];
}

std::span<const int32_t> PrefixCache::tokens_of(const Sequence& sequence, int32_t index) const {
    const size_t size = static_cast<size_t>(block_size_);
    return std::span(sequence.tokens).subspan(static_cast<size_t>(index) * size, size);
}

/// The content keys that a block touches: for each where it begins in the block, which part of its tokens the
/// block holds, and its bytes. Empty for most blocks.
std::string PrefixCache::content_of(const Sequence& sequence, int32_t index) const {
    std::string content;
    const int64_t begin = int64_t{index} * block_size_;
    for (const ContentKey& key : sequence.params.content_keys) {
        const int64_t first = key.first_token, end = first + key.num_tokens;
        if (first >= begin + block_size_ || end <= begin) continue;
        for (const int64_t value : {first - begin, end - begin, static_cast<int64_t>(key.key.size())}) {
            for (int shift = 0; shift < 64; shift += 8) content.push_back(static_cast<char>(value >> shift));
        }
        content += key.key;
    }
    return content;
}

bool PrefixCache::has_content(const Node& node, const Sequence& sequence, int32_t index) const {
    if (sequence.params.content_keys.empty()) return node.content.empty();
    return node.content == content_of(sequence, index);
}

int32_t PrefixCache::find_child(int32_t parent, Sequence& sequence, int32_t index) const {
    const auto found = index_.find(hash_of(sequence, index));
    if (found == index_.end()) return 0;
    const int32_t block = found->second;
    const Node& node = nodes_[block];
    if (node.parent != parent || !has_content(node, sequence, index) ||
        node.window_start != sequence.replay_start(replay_keep_tokens_)) {
        return 0;
    }
    const std::span<const int32_t> tokens = tokens_of(sequence, index);
    const auto own = tokens_.begin() + int64_t{block} * block_size_;
    return std::equal(tokens.begin(), tokens.end(), own) ? block : 0;
}

void PrefixCache::insert(int32_t block, int32_t parent, Sequence& sequence, int32_t index) {
    Node& node = nodes_[block];
    DI_CHECK(node.serial == 0, "block ", block, " is known");
    node.hash = hash_of(sequence, index);
    node.content = content_of(sequence, index);
    node.window_start = sequence.replay_start(replay_keep_tokens_);
    node.serial = next_serial_++;
    node.parent = parent;
    node.next_sibling = nodes_[parent].first_child;
    if (node.next_sibling != 0) nodes_[node.next_sibling].previous_sibling = block;
    nodes_[parent].first_child = block;
    const std::span<const int32_t> tokens = tokens_of(sequence, index);
    std::copy(tokens.begin(), tokens.end(), tokens_.begin() + int64_t{block} * block_size_);
    index_.emplace(node.hash, block);
    blocks_.keep(block);
    ++stats_.num_blocks;
}

void PrefixCache::remove_with_children(int32_t block) {
    const int32_t stop = nodes_[block].parent;
    while (block != stop) {  // leaves first
        if (nodes_[block].first_child != 0) {
            block = nodes_[block].first_child;
            continue;
        }
        const int32_t parent = nodes_[block].parent, sibling = nodes_[block].next_sibling;
        remove(block);
        block = sibling != 0 && parent != stop ? sibling : parent;
    }
}

void PrefixCache::remove(int32_t block) {
    Node& node = nodes_[block];
    if (node.previous_sibling != 0) {
        nodes_[node.previous_sibling].next_sibling = node.next_sibling;
    } else {
        nodes_[node.parent].first_child = node.next_sibling;
    }
    if (node.next_sibling != 0) nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
    if (node.snapshot != 0) drop_snapshot(block);
    index_.erase(node.hash);
    node = {};
    blocks_.forget(block);
    --stats_.num_blocks;
}

}  // namespace deepinfer
