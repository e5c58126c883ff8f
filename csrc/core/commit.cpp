#include "commit.hpp"

#include <algorithm>

#include "check.hpp"
#include "draft_outcomes.hpp"

namespace deepinfer {
namespace {

void require_size(const char* name, size_t size, int64_t expected, const char* meaning) {
    if (size != 0 && static_cast<int64_t>(size) != expected) {
        throw std::invalid_argument(
            concat(name, " has ", size, " elements, the plan has ", expected, " (", meaning, ")"));
    }
}

/// Alternatives that the outcome has to report, -1 none: sequences that ended since the plan was made, or
/// whose results do not count, no longer ask.
int32_t wanted_logprobs(const StepPlan& plan) {
    int32_t wanted = -1;
    for (const PlanSequence& entry : plan.sequences) {
        if (entry.sequence->is_finished() || entry.sequence->is_void) continue;
        const SequenceParams& params = entry.sequence->params;
        if (entry.num_samples > 0) wanted = std::max(wanted, params.num_logprobs);
        if (entry.num_scoring > 0) wanted = std::max(wanted, params.num_prompt_logprobs);
    }
    return wanted;
}

/// Copies the log-probability of output row `row` to entry `index` of a store.
void keep_logprob(LogprobStore& store, const StepOutcome& outcome, int32_t row, int32_t index) {
    const size_t size = static_cast<size_t>(index) + 1;
    if (store.values.size() < size) {
        store.values.resize(size);
        store.ranks.resize(size);
        store.top_ids.resize(size * store.width);
        store.top_values.resize(size * store.width);
    }
    store.values[index] = outcome.logprobs[row];
    store.ranks[index] = outcome.ranks.empty() ? 0 : outcome.ranks[row];
    const int64_t from = int64_t{row} * outcome.top_width;
    const int64_t to = int64_t{index} * store.width;
    std::copy_n(outcome.top_ids.begin() + from, store.width, store.top_ids.begin() + to);
    std::copy_n(outcome.top_logprobs.begin() + from, store.width, store.top_values.begin() + to);
}

/// The stop test after a token; first match wins.
FinishReason stop_test(const Sequence& sequence, int32_t token) {
    const SequenceParams& params = sequence.params;
    if (sequence.num_outputs() > params.min_tokens) {
        if (token == params.eos_token_id && !params.ignore_eos) return FinishReason::kStop;
        if (std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token) !=
            params.stop_token_ids.end()) {
            return FinishReason::kStop;
        }
    }
    return sequence.length() >= sequence.limit_length ? FinishReason::kLength : FinishReason::kNone;
}

/// Applies one sequence of the plan after another.
class Committer {
public:
    Committer(CoreState& state, const StepPlan& plan, const StepOutcome& outcome)
        : state_(state), plan_(plan), outcome_(outcome), now_(monotonic_seconds()) {
        result_.num_new_tokens.reserve(plan.sequences.size());
        result_.text_offsets.push_back(0);
        result_.verified_by_position.assign(static_cast<size_t>(state.config.num_draft_tokens), 0);
        result_.accepted_by_position = result_.verified_by_position;
    }

    CommitResult run() {
        int32_t row = 0;
        auto snapshot = plan_.snapshots.begin();  // in the order of the sequences
        for (int32_t s = 0; s < plan_.num_seqs(); ++s) {
            const PlanSequence& entry = plan_.sequences[s];
            Sequence& sequence = *entry.sequence;
            int32_t num_new = 0;
            const int32_t num_before = sequence.num_computed;
            if (!sequence.is_finished() && !sequence.is_void) {
                num_new = apply(entry, sequence, s, row);
                publish(sequence);
                if (num_new > 0 && sequence.params.needs_text) report_text(sequence, num_new);
            }
            result_.num_new_tokens.push_back(num_new);
            result_.num_tokens += num_new;
            row += entry.num_outputs();
            for (; snapshot != plan_.snapshots.end() && snapshot->sequence == &sequence; ++snapshot) {
                publish(*snapshot, num_before);
            }
            state_.leave_flight(sequence);
        }
        state_.compact();
        return std::move(result_);
    }

private:
    int32_t apply(const PlanSequence& entry, Sequence& sequence, int32_t s, int32_t row) {
        if (plan_.is_prefill()) {
            sequence.num_computed += entry.num_rows;
            state_.num_recomputed_rows += std::max(0, std::min(entry.end(), sequence.num_lost) - entry.start);
        }
        for (int32_t j = 0; j < entry.num_scoring; ++j, ++row) {
            if (fault(row) != ErrorKind::kNone) {
                end(sequence, FinishReason::kError, fault(row));
                return 0;
            }
            LogprobStore& store = *sequence.prompt_logprobs;
            const int32_t index = entry.first_scoring + j;
            keep_logprob(store, outcome_, row, index);
            if (state_.config.is_image_token(sequence.tokens[index + 1])) {
                store.values[index] = kLogprobFloor;
                store.ranks[index] = 0;
            }
            sequence.num_scored = entry.first_scoring + j + 1;
        }
        if (entry.num_samples == 0) return 0;
        const int32_t num_verified = std::min<int32_t>(entry.num_samples - 1, sequence.num_drafts);
        const int32_t emitted = count_emitted(num_verified, sequence, s, row);
        const int32_t num_new = append(sequence, row, emitted);
        learn_from_step(sequence, num_new, num_verified, emitted, state_.calibration);
        if (!plan_.is_prefill()) {
            sequence.num_computed = sequence.length() - 1;
            sequence.metrics.num_decode_steps += num_new > 0 ? 1 : 0;
            sequence.metrics.num_decode_tokens += num_new;
        }
        if (!sequence.is_finished()) {
            keep_drafts(sequence, s, emitted);
            if (!sequence.is_evicting) give_back_surplus(sequence);
            if (sequence.hands_off && !sequence.is_evicting) {
                end(sequence, FinishReason::kHandOff, ErrorKind::kNone);
            }
        }
        return num_new;
    }

    /// Blocks that the step has filled are known from now on, unless its results are unsound.
    void publish(Sequence& sequence) {
        if (sequence.error_kind == ErrorKind::kNumerics) state_.prefix_cache.retract(sequence);
        if (sequence.error_kind != ErrorKind::kNone) return;
        const int32_t num_computed = plan_.is_prefill() ? sequence.num_computed : sequence.length() - 1;
        if (num_computed >= sequence.publish_at) state_.prefix_cache.publish(sequence, num_computed);
    }

    /// A decode step may pass the border, or turn out to begin behind it: then its rings are too far on.
    void publish(const Snapshot& snapshot, int32_t num_before) {
        Sequence& sequence = *snapshot.sequence;
        const bool has_passed = num_before < snapshot.border && snapshot.border <= sequence.num_computed;
        if (has_passed && sequence.error_kind == ErrorKind::kNone) {
            state_.prefix_cache.publish_snapshot(sequence, snapshot.border, snapshot.slot,
                                                 !plan_.is_prefill());
        } else {
            state_.slots.release(snapshot.slot);
        }
    }

    ErrorKind fault(int32_t row) const {
        return outcome_.faults.empty() ? ErrorKind::kNone : static_cast<ErrorKind>(outcome_.faults[row]);
    }

    /// Rows whose token counts: the accepted ones and the first that differs from its draft.
    int32_t count_emitted(int32_t num_verified, Sequence& sequence, int32_t s, int32_t row) {
        int32_t emitted = 1;
        if (!outcome_.num_emitted.empty()) {
            emitted = outcome_.num_emitted[s];
        } else {
            while (emitted <= num_verified &&
                   outcome_.tokens[row + emitted - 1] == sequence.drafts[emitted - 1] &&
                   fault(row + emitted - 1) == ErrorKind::kNone) {
                ++emitted;
            }
        }
        SequenceMetrics& metrics = sequence.metrics;
        const int32_t accepted = std::min(emitted - 1, num_verified);
        for (int32_t j = 0; j < num_verified; ++j) {
            ++result_.verified_by_position[j];
            ++metrics.verified_by_position[j];
        }
        for (int32_t j = 0; j < accepted; ++j) {
            ++result_.accepted_by_position[j];
            ++metrics.accepted_by_position[j];
        }
        metrics.num_verified += num_verified;
        metrics.num_accepted += accepted;
        result_.num_verified += num_verified;
        result_.num_accepted += accepted;
        return emitted;
    }

    int32_t append(Sequence& sequence, int32_t row, int32_t emitted) {
        for (int32_t j = 0; j < emitted; ++j) {
            if (fault(row + j) != ErrorKind::kNone) {
                end(sequence, FinishReason::kError, fault(row + j));
                return j;
            }
            const int32_t token = outcome_.tokens[row + j];
            if (sequence.output_logprobs) {
                keep_logprob(*sequence.output_logprobs, outcome_, row + j, sequence.num_outputs());
            }
            sequence.append_output(token);
            if (sequence.metrics.first_token == 0.0) {
                sequence.metrics.first_token = now_;
                result_.first_token_latencies.push_back(now_ - sequence.metrics.arrival);
            }
            const bool ends = !outcome_.ends.empty() && outcome_.ends[row + j] != 0;
            const FinishReason reason = ends ? FinishReason::kStop : stop_test(sequence, token);
            if (reason != FinishReason::kNone) {
                if (reason == FinishReason::kStop) sequence.stop_token = token;
                end(sequence, reason, ErrorKind::kNone);
                return j + 1;
            }
        }
        return emitted;
    }

    void end(Sequence& sequence, FinishReason reason, ErrorKind kind) {
        state_.finish(sequence, reason, kind, now_);
        result_.finished_ids.push_back(sequence.id);
        result_.finished_reasons.push_back(static_cast<uint8_t>(reason));
    }

    /// The next block. Without one the newest estimates stay: of what the drafter last thought.
    void keep_drafts(Sequence& sequence, int32_t s, int32_t emitted) {
        sequence.num_drafts = 0;
        const int64_t first = int64_t{s} * outcome_.draft_width;
        if (outcome_.draft_width == 0 || outcome_.drafts[first] < 0) return;
        DraftEstimates& newest = sequence.newest_estimates;
        sequence.previous_estimates = newest;
        // A confidence reads the drafts before its own. Of these only the settled ones can be known to a
        // choice about the next block, which may hold the others again.
        if (sequence.is_ratio()) {
            sequence.previous_estimates.size =
                std::min<uint8_t>(newest.size, static_cast<uint8_t>(emitted + 1));
        }
        for (int32_t j = 0; j < outcome_.draft_width && outcome_.drafts[first + j] >= 0; ++j) {
            sequence.drafts[j] = outcome_.drafts[first + j];
            newest.confidences[j] = outcome_.confidences.empty() ? 1.0f : outcome_.confidences[first + j];
            ++sequence.num_drafts;
        }
        newest.size = sequence.num_drafts;
        sequence.drafted_at = plan_.step;
        sequence.metrics.num_drafted += sequence.num_drafts;
        result_.num_drafted += sequence.num_drafts;
    }

    /// Blocks that only rejected drafts needed; a later step in flight may still write as far as
    /// `next_length()`.
    void give_back_surplus(Sequence& sequence) {
        const int32_t needed =
            sequence.num_in_flight > 1 ? sequence.length() + sequence.last.max_samples : sequence.length();
        state_.trim_blocks(sequence, needed);
    }

    void report_text(const Sequence& sequence, int32_t num_new) {
        result_.text_ids.push_back(sequence.id);
        result_.text_tokens.insert(result_.text_tokens.end(), sequence.tokens.end() - num_new,
                                   sequence.tokens.end());
        result_.text_offsets.push_back(static_cast<int32_t>(result_.text_tokens.size()));
    }

    CoreState& state_;
    const StepPlan& plan_;
    const StepOutcome& outcome_;
    const double now_;
    CommitResult result_;
};

}  // namespace

void check_outcome(const StepPlan& plan, const StepOutcome& outcome, int32_t vocab_size, int32_t max_drafts) {
    if (static_cast<int64_t>(outcome.tokens.size()) != plan.num_outputs) {
        throw std::invalid_argument(concat("tokens has ", outcome.tokens.size(), " elements, the plan has ",
                                           plan.num_outputs, " output rows"));
    }
    require_size("num_emitted", outcome.num_emitted.size(), plan.num_seqs(), "sequences");
    require_size("logprobs", outcome.logprobs.size(), plan.num_outputs, "output rows");
    require_size("ranks", outcome.ranks.size(), plan.num_outputs, "output rows");
    require_size("faults", outcome.faults.size(), plan.num_outputs, "output rows");
    require_size("ends", outcome.ends.size(), plan.num_outputs, "output rows");
    require_size("top_ids", outcome.top_ids.size(), int64_t{plan.num_outputs} * outcome.top_width,
                 "output rows times k");
    require_size("top_logprobs", outcome.top_logprobs.size(), int64_t{plan.num_outputs} * outcome.top_width,
                 "output rows times k");
    require_size("drafts", outcome.drafts.size(), int64_t{plan.num_seqs()} * outcome.draft_width,
                 "sequences times k");
    require_size("confidences", outcome.confidences.size(), int64_t{plan.num_seqs()} * outcome.draft_width,
                 "sequences times k");
    const int32_t wanted = wanted_logprobs(plan);
    if (wanted >= 0 && outcome.logprobs.empty()) {
        throw std::invalid_argument("the plan asks for log-probabilities, logprobs is missing");
    }
    if (wanted > outcome.top_width) {
        throw std::invalid_argument(concat("the plan asks for the top ", wanted,
                                           " log-probabilities, top_ids has ", outcome.top_width,
                                           " columns"));
    }
    if (outcome.draft_width > max_drafts) {
        throw std::invalid_argument(
            concat("drafts has ", outcome.draft_width, " columns, num_draft_tokens is ", max_drafts));
    }
    const auto check_ids = [&](const char* name, std::span<const int32_t> ids, int32_t lowest) {
        for (int32_t id : ids) {
            if (id < lowest || (vocab_size > 0 && id >= vocab_size)) {
                throw std::invalid_argument(
                    concat(name, " holds ", id, ", the vocabulary has ", vocab_size, " ids"));
            }
        }
    };
    check_ids("drafts", outcome.drafts, -1);
    int32_t row = 0;
    for (int32_t s = 0; s < plan.num_seqs(); ++s) {
        const PlanSequence& entry = plan.sequences[s];
        row += entry.num_scoring;
        check_ids("tokens", outcome.tokens.subspan(row, entry.num_samples), 0);
        row += entry.num_samples;
        if (!outcome.num_emitted.empty() && entry.num_samples > 0 &&
            (outcome.num_emitted[s] < 1 || outcome.num_emitted[s] > entry.num_samples)) {
            throw std::invalid_argument(concat("num_emitted[", s, "]=", outcome.num_emitted[s],
                                               " must be in 1..", entry.num_samples, " for sequence ",
                                               entry.id));
        }
    }
}

CommitResult commit(CoreState& state, const StepOutcome& outcome) {
    DI_CHECK(!state.in_flight.empty(), "no step is in flight");
    const std::shared_ptr<StepPlan> plan = state.in_flight.front();
    CommitResult result = Committer(state, *plan, outcome).run();
    state.in_flight.pop_front();
    plan->is_outstanding = false;
    std::erase_if(state.loading, [&](const auto& entry) { return entry.second <= plan->step; });
    return result;
}

}  // namespace deepinfer
