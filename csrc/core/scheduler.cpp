#include "scheduler.hpp"

#include <algorithm>
#include <utility>

#include "check.hpp"

namespace deepinfer {
namespace {

/// Puts the next step of `sequence` into the plan and marks the sequence as in flight.
void add_to_plan(StepPlan& plan, Sequence& sequence, int32_t start, int32_t num_rows, int32_t max_rows,
                 int32_t num_samples, double now) {
    PlanSequence& entry = plan.sequences.emplace_back();
    entry.sequence = &sequence;
    entry.id = sequence.id;
    entry.start = start;
    entry.num_rows = num_rows;
    entry.max_rows = max_rows;
    entry.known_length = entry.total_length = sequence.length();
    entry.num_samples = num_samples;
    entry.remap = sequence.num_in_flight > 0 ? sequence.last.index : -1;
    plan.num_matched += entry.remap >= 0 ? 1 : 0;
    if (plan.is_prefill() && sequence.params.num_prompt_logprobs >= 0) {
        const int32_t begin = std::max(start, sequence.num_scored);
        entry.first_scoring = begin;
        entry.num_scoring = std::max(0, std::min(entry.end(), sequence.num_prompt - 1) - begin);
        if (entry.num_scoring > 0) {
            plan.max_num_logprobs = std::max(plan.max_num_logprobs, sequence.params.num_prompt_logprobs);
        }
    }
    if (num_samples > 0)
        plan.max_num_logprobs = std::max(plan.max_num_logprobs, sequence.params.num_logprobs);
    plan.num_rows += num_rows;
    plan.num_outputs += entry.num_outputs();
    plan.max_seqlen_q = std::max(plan.max_seqlen_q, num_rows);
    plan.max_seqlen_k = std::max(plan.max_seqlen_k, entry.max_end());
    const int32_t max_samples = num_samples + max_rows - num_rows;
    sequence.last = {plan.num_seqs() - 1, num_rows, num_samples, max_samples,
                     plan.num_seqs() > plan.first_drafting};
    ++sequence.num_in_flight;
    if (sequence.metrics.first_scheduled == 0.0) sequence.metrics.first_scheduled = now;
}

/// The border that a decode step of `sequence` may pass, ending at most at `max_end`; 0: none.
///
/// When it does, the step begins in front of the border, so it ends at most `num_draft_tokens` rows behind it
/// and the rings still hold all that a query at the border reads. An owner's open group is empty at a border.
int32_t border_passed(const CoreState& state, const Sequence& sequence, int32_t max_end) {
    if (!state.config.prefix_caching) return 0;
    int32_t start = sequence.num_computed;  // at least
    if (sequence.num_in_flight > 0) {
        start = state.in_flight.back()->is_prefill() ? sequence.next_computed() : start + 1;
    }
    const int32_t size = state.config.block_size;
    const int32_t border = (start / size + 1) * size;
    return border <= max_end ? border : 0;
}

/// Sequences that decode behind a prefill step.
int32_t num_running_behind(const CoreState& state, const PrefillChoice& choice) {
    const auto is_last = [](const PrefillChoice::Chunk& chunk) {
        return chunk.start + chunk.num_rows == chunk.sequence->length();
    };
    const auto num_last = std::count_if(choice.chunks.begin(), choice.chunks.end(), is_last);
    return state.num_running() + static_cast<int32_t>(num_last + std::ssize(choice.forks));
}

/// Keeps the state that `sequence` has when the step ends, if there is a slot for it.
void keep_state(CoreState& state, StepPlan& plan, Sequence& sequence, int32_t border) {
    if (state.slots.num_free() == 0) return;
    const int32_t slot = state.prefix_cache.take_slot();
    plan.state_copies.push_back({sequence.state_slot, slot});
    plan.snapshots.push_back({&sequence, border, slot});
}

}  // namespace

void settle_rows(CoreState& state, StepPlan& plan, std::span<const int32_t> seqlens_q) {
    DI_CHECK(!plan.is_settled(), "the rows of step ", plan.step, " stand");
    if (static_cast<int32_t>(seqlens_q.size()) != plan.num_seqs()) {
        throw std::invalid_argument(
            concat("seqlens_q has ", seqlens_q.size(), " elements, the plan has ", plan.num_seqs()));
    }
    int64_t sum = 0;
    for (int32_t s = 0; s < plan.num_seqs(); ++s) {
        const PlanSequence& entry = plan.sequences[s];
        const int32_t least = entry.remap >= 0 ? 1 : entry.num_rows;
        if (seqlens_q[s] < least || seqlens_q[s] > entry.max_rows) {
            throw std::invalid_argument(concat("seqlens_q[", s, "]=", seqlens_q[s], " must be in ", least,
                                               "..", entry.max_rows, " for sequence ", entry.id));
        }
        sum += seqlens_q[s];
    }
    if (sum != plan.num_rows) {
        throw std::invalid_argument(
            concat("seqlens_q sums to ", sum, ", the plan has ", plan.num_rows, " rows"));
    }
    plan.max_seqlen_q = 0;
    for (int32_t s = 0; s < plan.num_seqs(); ++s) {
        PlanSequence& entry = plan.sequences[s];
        Sequence& sequence = *entry.sequence;
        const int32_t num_rows = seqlens_q[s];
        entry.num_rows = entry.num_samples = num_rows;
        plan.max_seqlen_q = std::max(plan.max_seqlen_q, num_rows);
        LastStep& last = sequence.last;
        last.num_rows = last.num_samples = last.max_samples = num_rows;
        const bool is_staying = !sequence.is_finished() && !sequence.is_evicting;
        if (is_staying && sequence.num_in_flight == 1) state.trim_blocks(sequence, sequence.next_length());
    }
    plan.has_dealt_rows = true;
}

Scheduler::Scheduler(std::unique_ptr<DraftBudget> budget) : budget_(std::move(budget)) {}

bool Scheduler::wants_prefill(CoreState& state) const {
    if (state.num_running() > 0 && state.decode_steps < state.config.prefill_attempt_interval) return false;
    return !choose_prefill(state).chunks.empty();
}

std::shared_ptr<StepPlan> Scheduler::schedule(CoreState& state, std::optional<StepKind> kind) {
    const size_t most_in_flight = state.config.async_scheduling ? 1 : 0;
    DI_CHECK(state.in_flight.size() <= most_in_flight, state.in_flight.size(),
             " steps wait for their commit; commit or discard them before the next schedule");
    DI_CHECK(state.in_flight.empty() || state.in_flight.back()->is_settled(), "step ",
             state.in_flight.back()->step, " waits for set_seqlens_q");
    std::shared_ptr<StepPlan> plan;
    std::vector<int64_t> preempted_ids;
    if (kind == StepKind::kPrefill) {
        plan = plan_prefill(state);
    } else if (kind == StepKind::kDecode) {
        plan = plan_decode(state, preempted_ids);
    } else {
        const bool decodes_are_due =
            state.num_running() > 0 && state.decode_steps < state.config.prefill_attempt_interval;
        if (!decodes_are_due) plan = plan_prefill(state);
        if (!plan) plan = plan_decode(state, preempted_ids);
        if (!plan) plan = plan_prefill(state);  // nothing decodes, or preemption has made room
    }
    if (!plan) return nullptr;
    plan->step = state.next_step++;
    plan->preempted_ids = std::move(preempted_ids);
    plan->num_running = state.num_running();
    plan->num_waiting = static_cast<int32_t>(state.waiting.size());
    plan->num_free_blocks = state.blocks.num_free();
    for (const PlanSequence& entry : plan->sequences) {
        plan->max_blocks = std::max(plan->max_blocks, state.config.blocks_for(entry.max_end()));
        if (state.work.has_attention())
            plan->attention_flops += state.work.attention_flops(entry.start, entry.end());
    }
    state.in_flight.push_back(plan);
    return plan;
}

std::shared_ptr<StepPlan> Scheduler::plan_prefill(CoreState& state) {
    PrefillChoice choice = choose_prefill(state);
    if (choice.chunks.empty()) return nullptr;
    for (Sequence* sequence : choice.passed) ++sequence->num_overtaken;
    auto plan = std::make_shared<StepPlan>();
    plan->kind = StepKind::kPrefill;
    if (!budget_->wants_first_drafts(num_running_behind(state, choice))) {
        plan->first_drafting = static_cast<int32_t>(choice.chunks.size());
    }
    const double now = monotonic_seconds();
    // What is found is held before anybody takes blocks or slots and makes the cache forget.
    for (const PrefillChoice::Chunk& chunk : choice.chunks) state.prefix_cache.take(chunk.hit);
    for (PrefillChoice::Chunk& chunk : choice.chunks) {
        Sequence& sequence = *chunk.sequence;
        if (chunk.is_admission) {
            const int32_t snapshot = chunk.hit.snapshot;
            state.prefix_cache.count_query(sequence, chunk.hit.num_tokens);
            state.admit(sequence, std::move(chunk.hit));
            if (snapshot != 0) plan->slot_copies.push_back({snapshot, sequence.state_slot});
            if (chunk.is_cut) sequence.fork_border = chunk.state_border;
        }
        const bool is_last = chunk.start + chunk.num_rows == sequence.length();
        add_to_plan(*plan, sequence, chunk.start, chunk.num_rows, chunk.num_rows, is_last ? 1 : 0, now);
        if (chunk.state_border > 0) plan->sequences.back().total_length = chunk.state_border;
        if (is_last) state.start_running(sequence);
    }
    for (const PrefillChoice::Fork& fork : choice.forks) {
        state.admit_fork(*fork.sequence, *fork.leader, *plan);
    }
    for (const PrefillChoice::Chunk& chunk : choice.chunks) {
        const int32_t end = chunk.start + chunk.num_rows;
        const bool ends_at_border = end == chunk.sequence->length() && end % state.config.block_size == 0;
        if (chunk.state_border == end || (ends_at_border && state.config.prefix_caching)) {
            keep_state(state, *plan, *chunk.sequence, end);
        }
    }
    // Who was forked computes his last token next, together with the others.
    state.decode_steps = choice.forks.empty() ? 0 : state.config.prefill_attempt_interval;
    return plan;
}

std::shared_ptr<StepPlan> Scheduler::plan_decode(CoreState& state, std::vector<int64_t>& preempted_ids) {
    if (state.num_running() == 0) return nullptr;
    DecodeChoice choice = decode_policy_.choose(state, *budget_);
    state.compact();
    preempted_ids = std::move(choice.preempted_ids);
    if (choice.rows.empty()) return nullptr;
    auto plan = std::make_shared<StepPlan>();
    plan->kind = StepKind::kDecode;
    const auto num_seqs = static_cast<int32_t>(choice.rows.size());
    plan->first_drafting = num_seqs - budget_->num_drafting(num_seqs);
    plan->sequences.reserve(choice.rows.size());
    const double now = monotonic_seconds();
    for (const DecodeChoice::Row& row : choice.rows) {
        const int32_t num_rows = 1 + row.num_drafts;
        plan->num_draft_rows += row.num_drafts;
        Sequence& sequence = *row.sequence;
        const int32_t start = sequence.next_computed(), max_rows = 1 + row.max_drafts;
        const int32_t border = border_passed(state, sequence, start + max_rows);
        add_to_plan(*plan, sequence, start, num_rows, max_rows, num_rows, now);
        if (border > 0) keep_state(state, *plan, sequence, border);
    }
    plan->can_redistribute = std::any_of(plan->sequences.begin(), plan->sequences.end(),
                                         [](const auto& entry) { return entry.max_rows > entry.num_rows; });
    if (plan->can_redistribute) plan->confidence_odds = state.calibration.odds();
    ++state.decode_steps;
    return plan;
}

}  // namespace deepinfer
