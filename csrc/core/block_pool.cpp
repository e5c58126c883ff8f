#include "block_pool.hpp"

#include <numeric>

#include "check.hpp"

namespace deepinfer {

BlockPool::BlockPool(int32_t num_blocks) {
    if (num_blocks < 2) {
        throw std::invalid_argument(
            concat("a pool needs at least 2 ids because id 0 is reserved, got ", num_blocks));
    }
    ref_counts_.assign(static_cast<size_t>(num_blocks), 0);
    free_ring_.resize(static_cast<size_t>(num_blocks - 1));
    std::iota(free_ring_.begin(), free_ring_.end(), 1);
    num_free_ = num_blocks - 1;
}

int32_t BlockPool::allocate() {
    DI_CHECK(num_free_ > 0, "the pool of ", num_blocks(), " is empty");
    const int32_t block = free_ring_[head_];
    head_ = head_ + 1 == num_blocks() - 1 ? 0 : head_ + 1;
    --num_free_;
    ref_counts_[block] = 1;
    return block;
}

void BlockPool::allocate(int32_t count, std::vector<int32_t>& table) {
    for (int32_t i = 0; i < count; ++i) table.push_back(allocate());
}

void BlockPool::share(int32_t block) {
    DI_CHECK(ref_count(block) > 0, "block=", block, " is free");
    ++ref_counts_[block];
}

void BlockPool::release(int32_t block) {
    DI_CHECK(ref_count(block) > 0, "block=", block, " is free");
    if (--ref_counts_[block] > 0) return;
    const int32_t capacity = num_blocks() - 1;
    const int32_t tail = static_cast<int32_t>((int64_t{head_} + num_free_) % capacity);
    free_ring_[tail] = block;
    ++num_free_;
}

void BlockPool::release_tail(std::vector<int32_t>& table, int32_t keep) {
    while (static_cast<int32_t>(table.size()) > keep) {
        release(table.back());
        table.pop_back();
    }
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

std::vector<int32_t> BlockPool::free_ids() const {
    const int32_t capacity = num_blocks() - 1;
    std::vector<int32_t> ids(static_cast<size_t>(num_free_));
    for (int32_t i = 0; i < num_free_; ++i) {
        ids[i] = free_ring_[(int64_t{head_} + i) % capacity];
    }
    return ids;
}

}  // namespace deepinfer
