#include "scheduler.hpp"

#include <algorithm>
#include <utility>

#include "check.hpp"

namespace deepinfer {
namespace {

/// Puts the next step of `sequence` into the plan and marks the sequence as in flight.
void add_to_plan(StepPlan& plan, Sequence& sequence, int32_t start, int32_t num_rows, int32_t num_samples,
                 double now) {
    PlanSequence& entry = plan.sequences.emplace_back();
    entry.sequence = &sequence;
    entry.id = sequence.id;
    entry.start = start;
    entry.num_rows = num_rows;
    entry.known_length = sequence.length();
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
    plan.max_seqlen_k = std::max(plan.max_seqlen_k, entry.end());
    sequence.last = {plan.num_seqs() - 1, num_rows, num_samples};
    ++sequence.num_in_flight;
    if (sequence.metrics.first_scheduled == 0.0) sequence.metrics.first_scheduled = now;
}

}  // namespace

Scheduler::Scheduler(std::unique_ptr<DraftBudget> budget) : budget_(std::move(budget)) {}

bool Scheduler::wants_prefill(CoreState& state) const {
    if (state.num_running() > 0 && state.decode_steps < state.config.prefill_attempt_interval) return false;
    return !choose_prefill(state).chunks.empty();
}

std::shared_ptr<StepPlan> Scheduler::schedule(CoreState& state, std::optional<StepKind> kind) {
    const size_t most_in_flight = state.config.async_scheduling ? 1 : 0;
    DI_CHECK(state.in_flight.size() <= most_in_flight, state.in_flight.size(),
             " steps wait for their commit; commit or discard them before the next schedule");
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
        plan->max_blocks = std::max(plan->max_blocks, state.config.blocks_for(entry.end()));
        if (state.work.has_attention())
            plan->attention_flops += state.work.attention_flops(entry.start, entry.end());
    }
    state.in_flight.push_back(plan);
    return plan;
}

std::shared_ptr<StepPlan> Scheduler::plan_prefill(CoreState& state) {
    const PrefillChoice choice = choose_prefill(state);
    if (choice.chunks.empty()) return nullptr;
    for (Sequence* sequence : choice.passed) ++sequence->num_overtaken;
    auto plan = std::make_shared<StepPlan>();
    plan->kind = StepKind::kPrefill;
    const double now = monotonic_seconds();
    for (const PrefillChoice::Chunk& chunk : choice.chunks) {
        Sequence& sequence = *chunk.sequence;
        if (chunk.is_admission) state.admit(sequence);
        const bool is_last = chunk.start + chunk.num_rows == sequence.length();
        add_to_plan(*plan, sequence, chunk.start, chunk.num_rows, is_last ? 1 : 0, now);
        if (is_last) state.start_running(sequence);
    }
    state.decode_steps = 0;
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
    plan->sequences.reserve(choice.rows.size());
    const double now = monotonic_seconds();
    for (const DecodeChoice::Row& row : choice.rows) {
        const int32_t num_rows = 1 + row.num_drafts;
        plan->num_draft_rows += row.num_drafts;
        add_to_plan(*plan, *row.sequence, row.sequence->next_computed(), num_rows, num_rows, now);
    }
    ++state.decode_steps;
    return plan;
}

}  // namespace deepinfer
