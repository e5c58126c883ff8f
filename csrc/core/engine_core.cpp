#include "engine_core.hpp"

#include <algorithm>

#include "check.hpp"
#include "intake.hpp"
#include "integrity.hpp"
#include "sampling_inputs.hpp"

namespace deepinfer {

EngineCore::EngineCore(const CoreConfig& config) : state_(config), scheduler_(make_budget()) {}

std::unique_ptr<DraftBudget> EngineCore::make_budget() {
    const CoreConfig& config = state_.config;
    if (!config.use_draft_budget || config.num_draft_tokens == 0) return std::make_unique<FixedDraftBudget>();
    auto budget = std::make_unique<ScheduledDraftBudget>(config, state_.step_time, state_.calibration);
    draft_budget_ = budget.get();
    return budget;
}

void EngineCore::set_compressed_vocab(std::vector<int32_t> map, int32_t pad_id) {
    const std::lock_guard lock(mutex_);
    if (map.empty() || static_cast<int64_t>(map.size()) < state_.config.vocab_size) {
        throw std::invalid_argument(concat("the compressed vocabulary maps ", map.size(),
                                           " ids, the vocabulary has ", state_.config.vocab_size));
    }
    vocab_ = {std::move(map), pad_id};
}

int32_t EngineCore::num_known_ids() const {
    const int32_t mapped = static_cast<int32_t>(vocab_.map.size());
    return state_.config.vocab_size > 0 ? state_.config.vocab_size : mapped;
}

int64_t EngineCore::add(SequenceParams params, std::span<const int32_t> prompt) {
    const std::lock_guard lock(mutex_);
    check_request(state_.config, params, prompt, num_known_ids());
    Sequence& sequence = state_.sequences.create();
    prepare_sequence(state_.config, std::move(params), prompt, sequence);
    state_.waiting.emplace(sequence.id, &sequence);
    return sequence.id;
}

int64_t EngineCore::add_computed(SequenceParams params, ComputedSequence computed) {
    const std::lock_guard lock(mutex_);
    check_computed(state_.config, params, computed, num_known_ids());
    Sequence& sequence = state_.sequences.create();
    prepare_computed(state_.config, std::move(params), std::move(computed), sequence);
    if (!sequence.is_finished()) state_.waiting.emplace(sequence.id, &sequence);
    return sequence.id;
}

std::vector<AdmittedSequence> EngineCore::admit_computed() { return admit_outside(false); }

std::vector<AdmittedSequence> EngineCore::admit_swapped() { return admit_outside(true); }

std::vector<AdmittedSequence> EngineCore::admit_outside(bool is_swapped) {
    const std::lock_guard lock(mutex_);
    std::vector<AdmittedSequence> admitted;
    if (is_swapped && state_.swap.stats().num_held == 0) return admitted;
    DI_CHECK(state_.swap_outs.empty(), "sequence ", state_.swap_outs.front().id, " is not copied yet");
    for (Sequence* sequence : choose_computed(state_, is_swapped)) {
        state_.admit_computed(*sequence);
        admitted.push_back({sequence->id, sequence->blocks, sequence->state_slot});
    }
    return admitted;
}

std::pair<std::vector<SwapOut>, std::vector<int64_t>> EngineCore::take_swaps() {
    const std::lock_guard lock(mutex_);
    return {std::exchange(state_.swap_outs, {}), std::exchange(state_.swap_drops, {})};
}

std::vector<int64_t> EngineCore::keep_swaps(std::span<const int64_t> ids) {
    const std::lock_guard lock(mutex_);
    state_.swap_outs.clear();
    state_.swap_drops.clear();
    std::vector<int64_t> kept;
    for (const auto& [id, sequence] : state_.waiting) {
        if (sequence->swap_bytes == 0) continue;
        if (std::find(ids.begin(), ids.end(), id) != ids.end()) {
            kept.push_back(id);
        } else {
            state_.forget_swap(*sequence);
        }
    }
    return kept;
}

void EngineCore::set_copy_rate(double bytes_per_second) {
    const std::lock_guard lock(mutex_);
    state_.swap.set_copy_rate(bytes_per_second);
}

void EngineCore::add_prefill_time(const StepPlan& plan, double ms) {
    const std::lock_guard lock(mutex_);
    if (!plan.is_prefill()) return;
    const double rows = plan.num_rows;
    state_.swap.add_prefill_time(rows * state_.config.flops_per_token + plan.attention_flops, ms);
}

SwapStats EngineCore::swap_stats() {
    const std::lock_guard lock(mutex_);
    return state_.swap.stats();
}

int64_t EngineCore::num_recomputed_rows() {
    const std::lock_guard lock(mutex_);
    return state_.num_recomputed_rows;
}

bool EngineCore::abort(int64_t id) {
    const std::lock_guard lock(mutex_);
    Sequence& sequence = state_.sequences.get(id);
    if (sequence.is_finished()) return false;
    state_.finish(sequence, FinishReason::kAbort, ErrorKind::kNone, monotonic_seconds());
    state_.compact();
    return true;
}

bool EngineCore::fail(int64_t id, ErrorKind kind) {
    const std::lock_guard lock(mutex_);
    Sequence& sequence = state_.sequences.get(id);
    if (sequence.is_finished()) return false;
    state_.finish(sequence, FinishReason::kError, kind, monotonic_seconds());
    state_.compact();
    return true;
}

void EngineCore::stop(int64_t id, int32_t num_output_tokens, FinishReason reason) {
    const std::lock_guard lock(mutex_);
    Sequence& sequence = state_.sequences.get(id);
    if (num_output_tokens < 0 || num_output_tokens > sequence.num_kept_outputs()) {
        throw std::invalid_argument(concat("sequence ", id, " has ", sequence.num_kept_outputs(),
                                           " output tokens, cannot keep ", num_output_tokens));
    }
    if (reason == FinishReason::kNone)
        throw std::invalid_argument("a stopped sequence needs a finish reason");
    if (!sequence.is_finished()) {
        state_.finish(sequence, reason, ErrorKind::kNone, monotonic_seconds());
        state_.compact();
    }
    sequence.finish_reason = reason;
    sequence.error_kind = ErrorKind::kNone;
    sequence.stop_token = -1;
    sequence.kept_outputs = num_output_tokens;
}

void EngineCore::release(int64_t id) {
    const std::lock_guard lock(mutex_);
    Sequence& sequence = state_.sequences.get(id);
    if (!sequence.is_finished()) {
        throw std::invalid_argument(
            concat("sequence ", id, " is not finished; abort it before releasing it"));
    }
    std::erase(state_.ended, &sequence);
    if (sequence.num_in_flight == 0 && sequence.state_slot != 0) state_.drop_resources(sequence);
    if (sequence.num_in_flight > 0) {
        sequence.is_released = true;
    } else {
        state_.sequences.erase(id);
    }
}

bool EngineCore::preempt(int64_t id) {
    const std::lock_guard lock(mutex_);
    Sequence& sequence = state_.sequences.get(id);
    if (sequence.is_finished() || sequence.is_evicting || sequence.state_slot == 0) return false;
    state_.preempt(sequence);
    state_.compact();
    return true;
}

bool EngineCore::wants_prefill() {
    const std::lock_guard lock(mutex_);
    return scheduler_.wants_prefill(state_);
}

std::shared_ptr<StepPlan> EngineCore::schedule(std::optional<StepKind> kind) {
    const std::lock_guard lock(mutex_);
    return scheduler_.schedule(state_, kind);
}

std::pair<std::vector<int64_t>, std::vector<uint8_t>> EngineCore::take_ended() {
    const std::lock_guard lock(mutex_);
    std::pair<std::vector<int64_t>, std::vector<uint8_t>> ended;
    for (const Sequence* sequence : state_.ended) {
        ended.first.push_back(sequence->id);
        ended.second.push_back(static_cast<uint8_t>(sequence->finish_reason));
    }
    state_.ended.clear();
    return ended;
}

CommitResult EngineCore::commit(const StepPlan& plan, const StepOutcome& outcome) {
    const std::lock_guard lock(mutex_);
    require_outstanding(plan);
    DI_CHECK(state_.in_flight.front().get() == &plan, "step ", plan.step, " is committed before step ",
             state_.in_flight.front()->step);
    check_outcome(plan, outcome, num_known_ids(), state_.config.num_draft_tokens);
    return deepinfer::commit(state_, outcome);
}

int32_t EngineCore::discard_in_flight() {
    const std::lock_guard lock(mutex_);
    const int32_t count = static_cast<int32_t>(state_.in_flight.size());
    if (reservation_) state_.prefix_cache.cancel(*std::exchange(reservation_, std::nullopt));
    while (!state_.prefix_cache.unproved().empty()) {
        settle(state_.prefix_cache.unproved().begin()->first, false);
    }
    while (!state_.in_flight.empty()) {
        const std::shared_ptr<StepPlan> plan = state_.in_flight.front();
        for (const PlanSequence& entry : plan->sequences) {
            Sequence& sequence = *entry.sequence;
            const bool is_leaving = sequence.is_finished() || sequence.is_evicting;
            sequence.wants_swap = false;  // its bytes may be half written
            state_.leave_flight(sequence);
            if (!is_leaving && sequence.num_in_flight == 0) state_.restart(sequence);
        }
        for (const Snapshot& snapshot : plan->snapshots) state_.slots.release(snapshot.slot);
        for (const int64_t id : plan->forked_ids) state_.restart_fork(id);
        plan->is_outstanding = false;
        state_.in_flight.pop_front();
    }
    state_.restart_loading();
    state_.prefix_cache.take_published();  // others may take the blocks and slots before they are read
    state_.compact();
    return count;
}

Layout EngineCore::batch_layout(const StepPlan& plan) { return deepinfer::batch_layout(state_.config, plan); }

Layout EngineCore::sampling_layout(StepPlan& plan) {
    const std::lock_guard lock(mutex_);
    require_outstanding(plan);
    DI_CHECK(plan.num_matched == 0 || state_.in_flight.front().get() == &plan, "step ", plan.step,
             " samples before the step in front of it is committed");
    DI_CHECK(plan.is_settled(), "step ", plan.step, " samples before set_seqlens_q");
    return deepinfer::sampling_layout(plan);
}

void EngineCore::fill_batch(const StepPlan& plan, std::span<std::byte> buffer) {
    const std::lock_guard lock(mutex_);
    require_outstanding(plan);
    deepinfer::fill_batch(state_.config, vocab_, plan, buffer);
}

void EngineCore::fill_sampling(StepPlan& plan, std::span<std::byte> buffer) {
    const std::lock_guard lock(mutex_);
    require_outstanding(plan);
    DI_CHECK(plan.num_matched == 0 || state_.in_flight.front().get() == &plan, "step ", plan.step,
             " samples before the step in front of it is committed");
    deepinfer::fill_sampling(state_.config, plan, buffer);
}

void EngineCore::set_seqlens_q(StepPlan& plan, std::span<const int32_t> seqlens_q) {
    const std::lock_guard lock(mutex_);
    require_outstanding(plan);
    settle_rows(state_, plan, seqlens_q);
}

void EngineCore::set_step_times(std::span<const StepTimePoint> points,
                                std::span<const UndraftedTime> undrafted) {
    const std::lock_guard lock(mutex_);
    state_.step_time.set_points(points, undrafted);
    if (draft_budget_ != nullptr) draft_budget_->forget_observations();
}

void EngineCore::add_step_time(int32_t num_seqs, int32_t num_tokens, double ms, bool is_drafted,
                               int32_t num_emitted) {
    const std::lock_guard lock(mutex_);
    state_.step_time.add(num_seqs, num_tokens, ms, is_drafted);
    const bool has_drafts = is_drafted || num_tokens > num_seqs;
    if (draft_budget_ != nullptr && has_drafts && num_emitted >= 0) {
        draft_budget_->observe(num_seqs, num_tokens, num_emitted, ms, is_drafted);
    }
}

double EngineCore::step_ms(int32_t num_seqs, int32_t num_tokens) {
    const std::lock_guard lock(mutex_);
    return state_.step_time.is_known() ? state_.step_time.at(num_seqs)(num_tokens) : 0.0;
}

double EngineCore::undrafted_step_ms(int32_t num_seqs) {
    const std::lock_guard lock(mutex_);
    return state_.step_time.is_known() ? state_.step_time.undrafted_ms(num_seqs) : 0.0;
}

DraftBudgetStats EngineCore::draft_budget_stats() {
    const std::lock_guard lock(mutex_);
    return draft_budget_ == nullptr ? DraftBudgetStats{} : draft_budget_->stats();
}

DraftCalibration EngineCore::calibration() {
    const std::lock_guard lock(mutex_);
    return state_.calibration;
}

void EngineCore::reset_reliability() {
    const std::lock_guard lock(mutex_);
    state_.calibration.reset_reliability();
}

CoreCounts EngineCore::counts() {
    const std::lock_guard lock(mutex_);
    return {state_.num_running(),    static_cast<int32_t>(state_.waiting.size()),   state_.blocks.num_free(),
            state_.slots.num_free(), static_cast<int32_t>(state_.in_flight.size()), state_.num_preemptions};
}

bool EngineCore::reset_prefix_cache() {
    const std::lock_guard lock(mutex_);
    if (!state_.waiting.empty() || state_.num_running() > 0 || !state_.in_flight.empty()) return false;
    state_.prefix_cache.reset();
    return true;
}

PrefixCacheStats EngineCore::prefix_cache_stats() {
    const std::lock_guard lock(mutex_);
    return state_.prefix_cache.stats();
}

void EngineCore::start_reporting_prefixes() {
    const std::lock_guard lock(mutex_);
    state_.prefix_cache.start_reporting();
}

std::vector<PublishedBorder> EngineCore::take_published_borders() {
    const std::lock_guard lock(mutex_);
    return state_.prefix_cache.take_published();
}

std::vector<int64_t> EngineCore::take_arrivals() {
    const std::lock_guard lock(mutex_);
    std::vector<int64_t> ids;
    int32_t room = state_.config.max_num_seqs - state_.num_admitted();
    int64_t free_blocks = state_.blocks.num_free();
    for (const auto& [id, sequence] : state_.waiting) {
        if (sequence->state_slot != 0 || sequence->is_evicting || sequence->is_computed) continue;
        free_blocks -= state_.config.blocks_for(sequence->length());
        if (--room < 0 || free_blocks < 0) break;
        if (sequence->is_offered || !state_.prefix_cache.may_exchange(*sequence)) continue;
        sequence->is_offered = true;
        ids.push_back(id);
    }
    return ids;
}

KnownPrefix EngineCore::find_prefix(int64_t id) {
    const std::lock_guard lock(mutex_);
    Sequence& sequence = state_.sequences.get(id);
    const PrefixHit hit = state_.prefix_cache.find(sequence);
    return {hit.num_tokens, hit.num_known, sequence.replay_start(state_.config.replay_keep_tokens)};
}

std::optional<PrefixReservation> EngineCore::reserve_prefix(int64_t id, int32_t border) {
    const std::lock_guard lock(mutex_);
    DI_CHECK(!reservation_, "sequence ", reserved_for_, " has a reservation");
    Sequence& sequence = state_.sequences.get(id);
    if (sequence.status != SequenceStatus::kWaiting || sequence.state_slot != 0) return std::nullopt;
    reservation_ = state_.prefix_cache.reserve(sequence, border);
    reserved_for_ = id;
    return reservation_;
}

int64_t EngineCore::publish_prefix() {
    const std::lock_guard lock(mutex_);
    DI_CHECK(reservation_.has_value(), "nothing is reserved");
    const PrefixReservation reservation = *std::exchange(reservation_, std::nullopt);
    const auto found = state_.sequences.all().find(reserved_for_);
    if (found == state_.sequences.all().end()) {  // forgotten meanwhile, and its tokens with it
        state_.prefix_cache.cancel(reservation);
        return 0;
    }
    return state_.prefix_cache.publish(*found->second, reservation);
}

void EngineCore::settle_prefix(int64_t publication, bool is_sound) {
    const std::lock_guard lock(mutex_);
    settle(publication, is_sound);
    state_.compact();
}

void EngineCore::settle(int64_t publication, bool is_sound) {
    const auto nonsense = state_.prefix_cache.settle(publication, is_sound);
    if (nonsense) state_.restart_readers(*nonsense);
}

void EngineCore::cancel_prefix() {
    const std::lock_guard lock(mutex_);
    if (reservation_) state_.prefix_cache.cancel(*std::exchange(reservation_, std::nullopt));
}

void EngineCore::check_integrity() {
    const std::lock_guard lock(mutex_);
    deepinfer::check_integrity(state_);
}

std::vector<int32_t> EngineCore::free_blocks() {
    const std::lock_guard lock(mutex_);
    return state_.blocks.free_ids();
}

std::vector<int32_t> EngineCore::free_slots() {
    const std::lock_guard lock(mutex_);
    return state_.slots.free_ids();
}

void EngineCore::require_outstanding(const StepPlan& plan) const {
    const bool is_mine = std::any_of(state_.in_flight.begin(), state_.in_flight.end(),
                                     [&](const auto& mine) { return mine.get() == &plan; });
    DI_CHECK(is_mine, "step ", plan.step, " is committed, discarded or another engine's");
}

}  // namespace deepinfer
