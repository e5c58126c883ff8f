#include "block_pool.hpp"

#include <numeric>

#include "check.hpp"

namespace deepinfer {

BlockPool::BlockPool(int32_t num_blocks) {
    if (num_blocks < 2) {
        throw std::invalid_argument(
            concat("a pool needs at least 2 ids because id 0 is reserved, got ", num_blocks));
    }
    const size_t size = static_cast<size_t>(num_blocks);
    ref_counts_.assign(size, 0);
    is_kept_.assign(size, 0);
    links_.resize(size);
    free_ring_.resize(size - 1);
    std::iota(free_ring_.begin(), free_ring_.end(), 1);
    num_plain_ = num_blocks - 1;
}

int32_t BlockPool::allocate() {
    DI_CHECK(num_plain_ > 0, "the pool of ", num_blocks(), " has no plain free block");
    const int32_t block = free_ring_[head_];
    head_ = head_ + 1 == num_blocks() - 1 ? 0 : head_ + 1;
    --num_plain_;
    ref_counts_[block] = 1;
    return block;
}

void BlockPool::share(int32_t block) {
    if (ref_count(block) == 0) {
        DI_CHECK(is_kept(block), "block=", block, " is free");
        remove_cached(block);
    }
    ++ref_counts_[block];
}

void BlockPool::release(int32_t block) {
    DI_CHECK(ref_count(block) > 0, "block=", block, " is free");
    if (--ref_counts_[block] > 0) return;
    if (is_kept(block)) {
        add_cached(block);
    } else {
        add_plain(block);
    }
}

void BlockPool::release_tail(std::vector<int32_t>& table, int32_t keep) {
    while (static_cast<int32_t>(table.size()) > keep) {
        release(table.back());
        table.pop_back();
    }
}

void BlockPool::keep(int32_t block) {
    DI_CHECK(ref_count(block) > 0 && !is_kept(block), "block=", block, " ref_count=", ref_count(block),
             " kept=", is_kept(block));
    is_kept_[block] = 1;
}

void BlockPool::forget(int32_t block) {
    DI_CHECK(is_kept(block), "block=", block, " is not known");
    is_kept_[block] = 0;
    if (ref_count(block) > 0) return;
    remove_cached(block);
    add_plain(block);
}

void BlockPool::touch(int32_t block) {
    DI_CHECK(is_kept(block) && ref_count(block) == 0, "block=", block, " is not cached");
    remove_cached(block);
    add_cached(block);
}

int32_t BlockPool::ref_count(int32_t block) const {
    DI_CHECK(block > 0 && block < num_blocks(), "block=", block, " num_blocks=", num_blocks());
    return ref_counts_[block];
}

int32_t BlockPool::num_exclusive(std::span<const int32_t> table) const {
    int32_t count = 0;
    for (int32_t block : table) count += ref_count(block) == 1 ? 1 : 0;
    return count;
}

int32_t BlockPool::num_unheld(std::span<const int32_t> table) const {
    int32_t count = 0;
    for (int32_t block : table) count += ref_count(block) == 0 ? 1 : 0;
    return count;
}

std::vector<int32_t> BlockPool::free_ids() const {
    const int32_t capacity = num_blocks() - 1;
    std::vector<int32_t> ids;
    ids.reserve(static_cast<size_t>(num_free()));
    for (int32_t i = 0; i < num_plain_; ++i) ids.push_back(free_ring_[(int64_t{head_} + i) % capacity]);
    for (int32_t id = oldest_cached(); id != 0; id = links_[id].next) ids.push_back(id);
    return ids;
}

void BlockPool::add_plain(int32_t block) {
    const int32_t tail = static_cast<int32_t>((int64_t{head_} + num_plain_) % (num_blocks() - 1));
    free_ring_[tail] = block;
    ++num_plain_;
}

void BlockPool::add_cached(int32_t block) {
    const int32_t newest = links_[0].previous;
    links_[block] = {newest, 0};
    links_[newest].next = block;
    links_[0].previous = block;
    ++num_cached_;
}

void BlockPool::remove_cached(int32_t block) {
    const Link link = links_[block];
    links_[link.previous].next = link.next;
    links_[link.next].previous = link.previous;
    links_[block] = {};
    --num_cached_;
}

}  // namespace deepinfer
