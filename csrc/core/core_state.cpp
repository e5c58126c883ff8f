#include "core_state.hpp"

#include <algorithm>
#include <chrono>
#include <unordered_set>
#include <utility>

#include "check.hpp"

namespace deepinfer {
namespace {

void remove(std::vector<Sequence*>& list, const Sequence* sequence) {
    const auto found = std::find(list.begin(), list.end(), sequence);
    DI_CHECK(found != list.end(), "sequence ", sequence->id, " is not in the list");
    list.erase(found);
}

CoreConfig validated(const CoreConfig& config) {
    config.validate();
    return config;
}

}  // namespace

double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CoreState::CoreState(const CoreConfig& config)
    : config(validated(config)),
      work(config.attention_terms, config.flops_per_token),
      blocks(config.num_blocks),
      slots(config.num_state_slots),
      prefix_cache(this->config, blocks, slots),
      swap(this->config),
      calibration(config.num_draft_tokens),
      decode_steps(config.prefill_attempt_interval) {}

int32_t CoreState::num_blocks_leaving() const {
    int32_t count = 0;
    for (const Sequence* sequence : leaving) count += blocks.num_exclusive(sequence->blocks);
    return count;
}

void CoreState::admit(Sequence& sequence, PrefixHit&& hit) {
    DI_CHECK(sequence.state_slot == 0 && sequence.blocks.empty(), "sequence ", sequence.id,
             " holds resources");
    sequence.state_slot = prefix_cache.take_slot();
    sequence.blocks = std::move(hit.blocks);
    allocate_blocks(config.blocks_for(sequence.length()) - sequence.num_blocks(), sequence.blocks);
    sequence.num_computed = hit.num_tokens;
    sequence.fork_border = hit.num_known > hit.num_tokens ? hit.num_known : 0;
    sequence.num_overtaken = 0;
    if (sequence.metrics.first_scheduled == 0.0) sequence.metrics.num_cached_tokens = hit.num_tokens;
    partial.push_back(&sequence);
}

void CoreState::admit_fork(Sequence& sequence, const Sequence& leader, StepPlan& plan) {
    const int32_t num_shared = (sequence.length() - 1) / config.block_size;
    PrefixHit hit;
    hit.num_tokens = sequence.length() - 1;
    hit.blocks.assign(leader.blocks.begin(), leader.blocks.begin() + num_shared);
    for (const int32_t block : hit.blocks) blocks.share(block);
    admit(sequence, std::move(hit));
    plan.state_copies.push_back({leader.state_slot, sequence.state_slot});
    if (sequence.num_computed % config.block_size != 0) {
        plan.block_copies.push_back({leader.blocks[num_shared], sequence.blocks[num_shared]});
    }
    plan.forked_ids.push_back(sequence.id);
    prefix_cache.count_fork(sequence);
}

void CoreState::admit_computed(Sequence& sequence) {
    DI_CHECK(sequence.is_computed && sequence.state_slot == 0, "sequence ", sequence.id,
             " is not to be loaded");
    sequence.is_computed = false;
    if (sequence.swap_bytes > 0) swap.remove(std::exchange(sequence.swap_bytes, 0), true);
    sequence.state_slot = prefix_cache.take_slot();
    sequence.num_computed = sequence.length() - 1;
    allocate_blocks(config.blocks_for(sequence.num_computed), sequence.blocks);
    sequence.num_overtaken = 0;
    if (sequence.metrics.first_scheduled == 0.0) sequence.metrics.first_scheduled = monotonic_seconds();
    partial.push_back(&sequence);
    start_running(sequence);
    loading.emplace_back(sequence.id, next_step);
}

void CoreState::restart_loading() {
    for (const auto& [id, step] : std::exchange(loading, {})) {
        const auto found = sequences.all().find(id);
        if (found == sequences.all().end()) continue;
        Sequence& sequence = *found->second;
        if (sequence.status == SequenceStatus::kRunning && sequence.num_in_flight == 0) restart(sequence);
        if (sequence.swap_bytes > 0) forget_swap(sequence);
    }
}

void CoreState::allocate_blocks(int32_t count, std::vector<int32_t>& table) {
    for (int32_t i = 0; i < count; ++i) table.push_back(prefix_cache.take_block());
}

void CoreState::start_running(Sequence& sequence) {
    waiting.erase(sequence.id);
    remove(partial, &sequence);
    sequence.status = SequenceStatus::kRunning;
    sequence.running_index = static_cast<int32_t>(running.size());
    running.push_back(&sequence);
}

void CoreState::preempt(Sequence& sequence) {
    ++num_preemptions;
    ++sequence.metrics.num_preemptions;
    if (config.stop_preempted_request) {
        finish(sequence, FinishReason::kError, ErrorKind::kPreempted, monotonic_seconds());
        ended.push_back(&sequence);
        return;
    }
    // A prompt engine's sequences would have to decode where they go on.
    const bool is_running = sequence.status == SequenceStatus::kRunning;
    sequence.wants_swap = is_running && !sequence.hands_off && swap.is_enabled();
    restart(sequence);
}

void CoreState::restart(Sequence& sequence) {
    detach(sequence);
    sequence.status = SequenceStatus::kWaiting;
    waiting.emplace(sequence.id, &sequence);
    // Recomputed, it proposes the drafts at hand once more: what their confidences say may not decide about
    // them (see ScheduledDraftBudget).
    if (!sequence.wants_swap) sequence.newest_estimates.size = sequence.previous_estimates.size = 0;
    sequence.is_evicting = sequence.num_in_flight > 0;
    drop_or_leave(sequence);
}

void CoreState::restart_fork(int64_t id) {
    const auto found = sequences.all().find(id);
    if (found == sequences.all().end()) return;
    Sequence& sequence = *found->second;
    // In flight it is restarted with its own step.
    const bool is_waiting = sequence.status == SequenceStatus::kWaiting && !sequence.is_evicting;
    if (is_waiting && sequence.num_in_flight == 0 && sequence.state_slot != 0) restart(sequence);
}

void CoreState::restart_readers(const PrefixReservation& prefix) {
    const std::unordered_set<int32_t> bad_blocks(prefix.blocks.begin() + prefix.num_known,
                                                 prefix.blocks.end());
    std::unordered_set<int32_t> bad_slots{prefix.snapshot};
    for (const auto& plan : in_flight) {
        for (const auto* copies : {&plan->slot_copies, &plan->state_copies}) {
            for (const Copy& copy : *copies) {
                if (bad_slots.contains(copy.source)) bad_slots.insert(copy.target);
            }
        }
    }
    for (const auto& [id, owner] : sequences.all()) {
        Sequence& sequence = *owner;
        if (sequence.is_finished() || sequence.state_slot == 0) continue;
        const bool has_read =
            bad_slots.contains(sequence.state_slot) ||
            std::any_of(sequence.blocks.begin(), sequence.blocks.end(),
                        [&](int32_t block) { return bad_blocks.contains(block); });
        if (!has_read) continue;
        sequence.is_void = sequence.num_in_flight > 0;
        sequence.wants_swap = false;
        if (sequence.metrics.first_token == 0.0) {  // it has not really begun
            sequence.metrics.first_scheduled = 0.0;
            sequence.metrics.num_cached_tokens = 0;
        }
        if (!sequence.is_evicting) restart(sequence);
    }
}

void CoreState::finish(Sequence& sequence, FinishReason reason, ErrorKind kind, double now) {
    DI_CHECK(!sequence.is_finished(), "sequence ", sequence.id, " is finished");
    if (reason == FinishReason::kHandOff) {
        DI_CHECK(!sequence.is_evicting && sequence.num_in_flight == 1, "sequence ", sequence.id,
                 " is handed off outside of its commit");
        detach(sequence);
    } else if (sequence.is_evicting) {
        waiting.erase(sequence.id);  // already listed in `leaving`
        sequence.is_evicting = false;
    } else {
        detach(sequence);
        drop_or_leave(sequence);
    }
    sequence.status = SequenceStatus::kFinished;
    sequence.finish_reason = reason;
    sequence.error_kind = kind;
    sequence.metrics.finish = now;
}

void CoreState::leave_flight(Sequence& sequence) {
    DI_CHECK(sequence.num_in_flight > 0, "sequence ", sequence.id, " is not in flight");
    --sequence.num_in_flight;
    if (sequence.num_in_flight > 0 || !(sequence.is_finished() || sequence.is_evicting)) return;
    if (sequence.finish_reason == FinishReason::kHandOff) return;
    remove(leaving, &sequence);
    sequence.is_evicting = false;
    swap_or_drop(sequence);
    if (sequence.is_released) sequences.erase(sequence.id);
}

void CoreState::trim_blocks(Sequence& sequence, int32_t num_tokens) {
    const int32_t keep = config.blocks_for(num_tokens);
    if (sequence.num_blocks() > keep) blocks.release_tail(sequence.blocks, keep);
}

void CoreState::compact() {
    if (num_holes_ == 0) return;
    std::erase(running, nullptr);
    num_holes_ = 0;
    for (size_t i = 0; i < running.size(); ++i) running[i]->running_index = static_cast<int32_t>(i);
}

void CoreState::detach(Sequence& sequence) {
    if (sequence.status == SequenceStatus::kRunning) {
        DI_CHECK(running[sequence.running_index] == &sequence, "sequence ", sequence.id,
                 " is not where it says");
        running[sequence.running_index] = nullptr;
        ++num_holes_;
        return;
    }
    waiting.erase(sequence.id);
    if (sequence.state_slot != 0 && !sequence.is_evicting) remove(partial, &sequence);
}

void CoreState::swap_or_drop(Sequence& sequence) {
    const bool wants_swap = std::exchange(sequence.wants_swap, false);
    if (!sequence.is_finished()) {
        if (wants_swap) {
            if (swap_out(sequence)) return;
            sequence.newest_estimates.size = sequence.previous_estimates.size = 0;
        }
        sequence.num_lost = std::max(sequence.num_lost, sequence.num_computed);
    }
    drop_resources(sequence);
}

bool CoreState::swap_out(Sequence& sequence) {
    if (sequence.num_outputs() == 0 || sequence.num_computed != sequence.length() - 1) return false;
    const int32_t num_blocks = config.blocks_for(sequence.num_computed);
    const int32_t num_scores = sequence.is_ratio() ? sequence.num_drafts : 0;
    const int64_t bytes = swap.bytes_of(num_blocks, num_scores);
    const int32_t num_found = prefix_cache.find(sequence).num_tokens;
    if (!swap.accepts(bytes, work.recompute_flops(sequence.num_computed, num_found))) return false;
    swap.add(bytes);
    const auto begin = sequence.blocks.begin();
    swap_outs.push_back({sequence.id, {begin, begin + num_blocks}, sequence.state_slot, num_scores});
    const uint8_t num_drafts = sequence.num_drafts;
    drop_resources(sequence);
    sequence.num_drafts = num_drafts;
    sequence.swap_bytes = bytes;
    sequence.is_computed = true;
    return true;
}

void CoreState::forget_swap(Sequence& sequence) {
    swap.remove(std::exchange(sequence.swap_bytes, 0), false);
    sequence.is_computed = false;
    sequence.num_lost = std::max(sequence.num_lost, sequence.length() - 1);
    sequence.num_drafts = 0;
    sequence.newest_estimates.size = sequence.previous_estimates.size = 0;
}

void CoreState::drop_resources(Sequence& sequence) {
    if (sequence.swap_bytes > 0) {  // it has ended
        swap.remove(std::exchange(sequence.swap_bytes, 0), false);
        swap_drops.push_back(sequence.id);
    }
    blocks.release_tail(sequence.blocks, 0);
    if (sequence.state_slot != 0) slots.release(sequence.state_slot);
    sequence.state_slot = 0;
    sequence.num_computed = 0;
    sequence.num_drafts = 0;
    sequence.is_void = false;
    sequence.fork_border = sequence.publish_at = 0;
    sequence.prefix.num_published = sequence.prefix.node = 0;
}

void CoreState::drop_or_leave(Sequence& sequence) {
    if (sequence.num_in_flight > 0) {
        leaving.push_back(&sequence);
    } else {
        swap_or_drop(sequence);
    }
}

}  // namespace deepinfer
