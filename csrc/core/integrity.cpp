#include "integrity.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "check.hpp"

namespace deepinfer {
namespace {

/// Every id is either free once or held as often as its reference count says.
void check_pool(const char* name, const BlockPool& pool, const std::vector<int32_t>& holders) {
    std::vector<bool> is_free(static_cast<size_t>(pool.num_blocks()), false);
    for (int32_t id : pool.free_ids()) {
        DI_CHECK(id > 0 && id < pool.num_blocks(), name, " free list holds ", id);
        DI_CHECK(!is_free[id], name, " ", id, " is twice in the free list");
        is_free[id] = true;
    }
    int32_t num_cached = 0;
    DI_CHECK(holders[0] == 0, name, " 0 is reserved but held");
    for (int32_t id = 1; id < pool.num_blocks(); ++id) {
        DI_CHECK(pool.ref_count(id) == holders[id], name, " ", id, " ref_count=", pool.ref_count(id),
                 " holders=", holders[id]);
        DI_CHECK(is_free[id] == (holders[id] == 0), name, " ", id,
                 is_free[id] ? " is free but held" : " is lost");
        num_cached += is_free[id] && pool.is_kept(id) ? 1 : 0;
    }
    DI_CHECK(num_cached == pool.num_cached(), name, " cached=", pool.num_cached(), " known=", num_cached);
    const std::vector<int32_t> ids = pool.free_ids();
    for (size_t i = 0; i < ids.size(); ++i) {
        DI_CHECK(pool.is_kept(ids[i]) == (static_cast<int32_t>(i) >= pool.num_plain()), name, " ", ids[i],
                 " is in the wrong free list");
    }
}

void check_queues(const CoreState& state) {
    for (const auto& [id, sequence] : state.waiting) {
        DI_CHECK(sequence->id == id && sequence->status == SequenceStatus::kWaiting, "sequence ", id,
                 " waits wrongly");
    }
    DI_CHECK(static_cast<int32_t>(state.running.size()) == state.num_running(), "running has holes");
    for (size_t i = 0; i < state.running.size(); ++i) {
        const Sequence& sequence = *state.running[i];
        DI_CHECK(
            sequence.status == SequenceStatus::kRunning && sequence.running_index == static_cast<int32_t>(i),
            "sequence ", sequence.id, " runs wrongly");
        DI_CHECK(!sequence.is_evicting, "sequence ", sequence.id, " runs and is being evicted");
    }
    DI_CHECK(state.num_admitted() <= state.config.max_num_seqs, "admitted=", state.num_admitted());
    const std::unordered_set<const Sequence*> partial(state.partial.begin(), state.partial.end());
    const std::unordered_set<const Sequence*> leaving(state.leaving.begin(), state.leaving.end());
    DI_CHECK(partial.size() == state.partial.size() && leaving.size() == state.leaving.size(),
             "a sequence is listed twice");
    for (const auto& [id, owner] : state.sequences.all()) {
        const Sequence& sequence = *owner;
        const bool waits = state.waiting.contains(id);
        DI_CHECK(waits == (sequence.status == SequenceStatus::kWaiting), "sequence ", id,
                 " is not in the waiting queue");
        const bool runs = sequence.running_index < static_cast<int32_t>(state.running.size()) &&
                          state.running[sequence.running_index] == &sequence;
        DI_CHECK(runs == (sequence.status == SequenceStatus::kRunning), "sequence ", id,
                 " is not in the running list");
        DI_CHECK(partial.contains(&sequence) == (waits && sequence.state_slot != 0 && !sequence.is_evicting),
                 "sequence ", id, " partial=", partial.contains(&sequence));
        DI_CHECK(leaving.contains(&sequence) ==
                     (sequence.num_in_flight > 0 && (sequence.is_finished() || sequence.is_evicting)),
                 "sequence ", id, " leaving=", leaving.contains(&sequence));
        DI_CHECK(sequence.num_in_flight > 0 || !sequence.is_released, "sequence ", id,
                 " is released but kept");
        DI_CHECK(!sequence.is_evicting || waits, "sequence ", id, " is evicted but does not wait");
        DI_CHECK(!sequence.is_void || sequence.num_in_flight > 0, "sequence ", id,
                 " is void but not in flight");
    }
}

void check_lengths(const CoreState& state) {
    const CoreConfig& config = state.config;
    for (const auto& [id, owner] : state.sequences.all()) {
        const Sequence& sequence = *owner;
        DI_CHECK(sequence.length() <= sequence.limit_length, "sequence ", id, " has ", sequence.length(),
                 " tokens");
        DI_CHECK((sequence.state_slot != 0) == !sequence.blocks.empty(), "sequence ", id,
                 " slot=", sequence.state_slot, " blocks=", sequence.blocks.size());
        DI_CHECK(sequence.num_computed <= int64_t{sequence.num_blocks()} * config.block_size, "sequence ", id,
                 " computed=", sequence.num_computed, " blocks=", sequence.num_blocks());
        DI_CHECK(sequence.num_drafts <= config.num_draft_tokens, "sequence ", id,
                 " drafts=", sequence.num_drafts);
        DI_CHECK(!sequence.is_computed || sequence.is_finished() ||
                     (sequence.status == SequenceStatus::kWaiting && sequence.state_slot == 0),
                 "sequence ", id, " waits for its bytes and holds resources");
        if (sequence.is_finished()) {
            DI_CHECK(sequence.state_slot == 0 || sequence.num_in_flight > 0 || sequence.hands_off,
                     "sequence ", id, " has ended and holds resources");
            continue;
        }
        DI_CHECK(sequence.length() < sequence.limit_length, "sequence ", id, " is over its limit");
        if (sequence.status == SequenceStatus::kRunning && sequence.num_in_flight == 0) {
            DI_CHECK(sequence.num_computed == sequence.length() - 1, "sequence ", id,
                     " computed=", sequence.num_computed);
            DI_CHECK(
                sequence.num_blocks() >= config.blocks_for(sequence.length() - 1) &&
                    sequence.num_blocks() <= config.blocks_for(sequence.length() + config.num_draft_tokens),
                "sequence ", id, " blocks=", sequence.num_blocks());
        }
        if (sequence.status == SequenceStatus::kWaiting && sequence.state_slot == 0) {
            DI_CHECK(sequence.num_computed == 0, "sequence ", id, " waits with ", sequence.num_computed,
                     " computed");
        }
    }
}

void check_swaps(const CoreState& state) {
    int32_t num_held = 0;
    int64_t held_bytes = 0;
    for (const auto& [id, sequence] : state.sequences.all()) {
        DI_CHECK(!sequence->wants_swap || sequence->num_in_flight > 0, "sequence ", id, " is never swapped");
        if (sequence->swap_bytes == 0) continue;
        ++num_held;
        held_bytes += sequence->swap_bytes;
        DI_CHECK(sequence->is_computed && sequence->status == SequenceStatus::kWaiting, "sequence ", id,
                 " is swapped out and does not wait for its bytes");
    }
    const SwapStats stats = state.swap.stats();
    DI_CHECK(num_held == stats.num_held && held_bytes == stats.held_bytes, "swapped=", num_held, " with ",
             held_bytes, " bytes, counted=", stats.num_held, " with ", stats.held_bytes);
    DI_CHECK(held_bytes <= state.swap.limit_bytes(), "swapped bytes=", held_bytes);
}

/// A block with several holders, or one that is known, is full and nobody writes to it any more.
void check_sharing(const CoreState& state, const std::vector<int32_t>& holders) {
    const int32_t size = state.config.block_size;
    std::unordered_map<const Sequence*, int32_t> ends;
    for (const auto& plan : state.in_flight) {
        if (!plan->is_prefill()) continue;
        for (const PlanSequence& entry : plan->sequences) ends[entry.sequence] = entry.end();
    }
    for (const auto& [id, sequence] : state.sequences.all()) {
        const auto planned = ends.find(sequence.get());
        const int32_t num_written =
            std::max(sequence->num_computed, planned == ends.end() ? 0 : planned->second);
        for (int32_t i = 0; i < sequence->num_blocks(); ++i) {
            const int32_t block = sequence->blocks[i];
            if (holders[block] == 1 && !state.blocks.is_kept(block)) continue;
            DI_CHECK(state.config.prefix_caching, "block ", block, " is shared");
            DI_CHECK(int64_t{i + 1} * size <= num_written, "block ", block,
                     " is shared or known, sequence ", id, " has written ", num_written, " tokens");
            DI_CHECK(std::count(sequence->blocks.begin(), sequence->blocks.end(), block) == 1, "block ",
                     block, " is twice in the table of sequence ", id);
        }
    }
}

}  // namespace

void check_integrity(const CoreState& state) {
    std::vector<int32_t> block_holders(static_cast<size_t>(state.blocks.num_blocks()), 0);
    std::vector<int32_t> slot_holders(static_cast<size_t>(state.slots.num_blocks()), 0);
    for (const auto& [id, sequence] : state.sequences.all()) {
        for (int32_t block : sequence->blocks) {
            DI_CHECK(block > 0 && block < state.blocks.num_blocks(), "sequence ", id, " holds block ", block);
            ++block_holders[block];
        }
        if (sequence->state_slot != 0) ++slot_holders[sequence->state_slot];
    }
    for (const auto& plan : state.in_flight) {
        for (const Snapshot& snapshot : plan->snapshots) ++slot_holders[snapshot.slot];
    }
    for (const auto& [id, prefix] : state.prefix_cache.unproved()) {
        for (const int32_t block : prefix.blocks) ++block_holders[block];
        ++slot_holders[prefix.snapshot];
    }
    check_pool("block", state.blocks, block_holders);
    check_pool("slot", state.slots, slot_holders);
    for (int32_t slot = 1; slot < state.slots.num_blocks(); ++slot) {
        DI_CHECK(slot_holders[slot] <= 1, "slot ", slot, " is shared");
    }
    check_sharing(state, block_holders);
    state.prefix_cache.check();
    check_queues(state);
    check_lengths(state);
    check_swaps(state);
    std::unordered_map<const Sequence*, int32_t> flights;
    for (const auto& plan : state.in_flight) {
        for (const PlanSequence& entry : plan->sequences) ++flights[entry.sequence];
    }
    for (const auto& [id, sequence] : state.sequences.all()) {
        const auto found = flights.find(sequence.get());
        const int32_t expected = found == flights.end() ? 0 : found->second;
        DI_CHECK(sequence->num_in_flight == expected, "sequence ", id,
                 " in_flight=", int{sequence->num_in_flight}, " plans=", expected);
        DI_CHECK(expected == 0 || sequence->state_slot != 0, "sequence ", id, " is in flight without a slot");
    }
}

}  // namespace deepinfer
