#include "decode_policy.hpp"

#include <algorithm>
#include <tuple>

#include "check.hpp"

namespace deepinfer {
namespace {

bool is_spared(const CoreState& state, const Sequence& sequence) {
    return sequence.metrics.num_preemptions >= state.config.max_preemptions;
}

/// Whether `taker` may take the blocks of `holder` at all.
bool may_take(const CoreState& state, const Sequence& taker, const Sequence& holder) {
    return !is_spared(state, holder) || (is_spared(state, taker) && taker.id < holder.id);
}

/// Recompute cost per freed block, compared by cross products; the younger of equals goes.
struct Victim {
    Sequence* sequence = nullptr;
    size_t place = 0;  ///< in the serving order, or past its end for a partly prefilled sequence
    double cost = 0.0;
    int32_t freed = 0;

    bool is_better_than(const Victim& other) const {
        if (other.sequence == nullptr) return true;
        const double mine = cost * other.freed;
        const double theirs = other.cost * freed;
        return mine < theirs || (mine == theirs && sequence->id > other.sequence->id);
    }
};

/// Blocks for `length` tokens and some drafts. The last token of a sequence is never read, so it needs no
/// place: a row that turns out to stand there (its sequence ended in flight) writes to the reserved block.
int32_t demand(const CoreConfig& config, const Sequence& sequence, int32_t length) {
    return config.blocks_for(std::min(length, sequence.limit_length - 1));
}

Victim as_victim(const CoreState& state, Sequence* sequence, size_t place) {
    return {sequence, place, state.work.recompute_flops(sequence->next_computed()),
            state.blocks.num_exclusive(sequence->blocks)};
}

}  // namespace

DecodeChoice DecodePolicy::choose(CoreState& state, DraftBudget& budget) {
    const CoreConfig& config = state.config;
    candidates_.clear();
    questions_.clear();
    num_blocks_ending_ = 0;
    for (Sequence* sequence : state.running) {
        if (sequence->ends_in_flight()) {
            num_blocks_ending_ += sequence->num_blocks();
            continue;
        }
        const int32_t length = sequence->next_length();
        int32_t at_hand = sequence->num_drafts;
        if (sequence->num_in_flight > 0) at_hand = sequence->last.has_drafts ? config.num_draft_tokens : 0;
        // A step emits one token more than the drafts it accepts.
        const int32_t useful = std::clamp(sequence->limit_length - length - 1, 0, config.num_draft_tokens);
        candidates_.push_back({sequence, length, 0, 0, false, false});
        questions_.push_back({sequence, std::min(at_hand, useful), useful});
    }
    if (config.num_draft_tokens > 0) {
        answers_.assign(candidates_.size(), 0);
        budget.choose(questions_, static_cast<int32_t>(state.waiting.size()), answers_);
        const bool has_drafts =
            std::any_of(answers_.begin(), answers_.end(), [](int32_t n) { return n > 0; });
        for (size_t i = 0; i < candidates_.size(); ++i) {
            DI_CHECK(answers_[i] >= 0 && answers_[i] <= questions_[i].max_drafts, "num_drafts=", answers_[i],
                     " max_drafts=", questions_[i].max_drafts);
            candidates_[i].num_drafts = answers_[i];
            const bool is_dealt_anew =
                config.redistributes() && has_drafts && candidates_[i].sequence->num_in_flight > 0;
            candidates_[i].max_drafts = is_dealt_anew ? questions_[i].max_drafts : answers_[i];
        }
    }
    DecodeChoice choice;
    if (!try_everybody(state)) serve_in_order(state, choice);
    choice.rows.reserve(candidates_.size());
    for (const Candidate& candidate : candidates_) {
        if (candidate.is_served)
            choice.rows.push_back({candidate.sequence, candidate.num_drafts, candidate.max_drafts});
    }
    return choice;
}

/// The common case: every demand fits, nobody needs to be ranked.
bool DecodePolicy::try_everybody(CoreState& state) {
    const CoreConfig& config = state.config;
    int64_t missing = 0;
    for (const Candidate& candidate : candidates_) {
        const int32_t wanted = demand(config, *candidate.sequence, candidate.length + candidate.max_drafts);
        const int32_t held = candidate.sequence->num_blocks();
        DI_CHECK(held <= wanted, "sequence ", candidate.sequence->id, " holds ", held, " blocks, may use ",
                 wanted);
        missing += wanted - held;
    }
    if (missing > state.blocks.num_free()) return false;
    for (Candidate& candidate : candidates_) {
        const int32_t wanted = demand(config, *candidate.sequence, candidate.length + candidate.max_drafts);
        const int32_t need = wanted - candidate.sequence->num_blocks();
        if (need > 0) state.allocate_blocks(need, candidate.sequence->blocks);
        candidate.is_served = true;
    }
    return true;
}

void DecodePolicy::serve_in_order(CoreState& state, DecodeChoice& choice) {
    const CoreConfig& config = state.config;
    order_.clear();
    for (Candidate& candidate : candidates_) order_.push_back(&candidate);
    std::sort(order_.begin(), order_.end(), [&](const Candidate* a, const Candidate* b) {
        const auto rank = [&](const Candidate& candidate) {
            const Sequence& sequence = *candidate.sequence;
            const bool spared = is_spared(state, sequence);
            return std::tuple(!spared, spared ? 0 : candidate.length - sequence.num_prompt, sequence.id);
        };
        return rank(*a) < rank(*b);
    });
    for (size_t place = 0; place < order_.size(); ++place) {
        Candidate& candidate = *order_[place];
        if (candidate.is_gone) continue;
        const int32_t need =
            demand(config, *candidate.sequence, candidate.length) - candidate.sequence->num_blocks();
        if (need > 0) {
            if (!find_block(state, place, need, choice)) continue;
            state.allocate_blocks(need, candidate.sequence->blocks);
        }
        candidate.is_served = true;
    }
    for (Candidate* candidate : order_) {
        if (!candidate->is_served) continue;
        std::vector<int32_t>& table = candidate->sequence->blocks;
        const int32_t wanted =
            demand(config, *candidate->sequence, candidate->length + candidate->max_drafts);
        const int32_t taken =
            std::min(state.blocks.num_free(), std::max(0, wanted - static_cast<int32_t>(table.size())));
        state.allocate_blocks(taken, table);
        const int64_t room =
            int64_t{candidate->sequence->num_blocks()} * config.block_size - candidate->length;
        candidate->max_drafts = static_cast<int32_t>(std::clamp<int64_t>(room, 0, candidate->max_drafts));
        candidate->num_drafts = std::min(candidate->num_drafts, candidate->max_drafts);
    }
}

/// Makes `need` blocks free for the candidate at `place`, preempting if it must. False when the candidate
/// cannot run in this step: it waits for blocks that a commit will free, or it was preempted itself.
bool DecodePolicy::find_block(CoreState& state, size_t place, int32_t need, DecodeChoice& choice) {
    Candidate& candidate = *order_[place];
    const Sequence& sequence = *candidate.sequence;
    const bool is_in_flight = sequence.num_in_flight > 0;
    const bool may_do_without =
        is_in_flight && demand(state.config, sequence, sequence.length() + 1) <= sequence.num_blocks();
    while (state.blocks.num_free() < need) {
        const int32_t arriving = state.num_blocks_leaving() + num_blocks_ending_;
        if (may_do_without || state.blocks.num_free() + arriving >= need) return false;
        Victim best;
        for (size_t later = place + 1; later < order_.size(); ++later) {
            Sequence* holder = order_[later]->sequence;
            if (order_[later]->is_gone || !may_take(state, sequence, *holder)) continue;
            const Victim victim = as_victim(state, holder, later);
            if (victim.freed > 0 && victim.is_better_than(best)) best = victim;
        }
        for (Sequence* holder : state.partial) {
            if (!may_take(state, sequence, *holder)) continue;
            const Victim victim = as_victim(state, holder, order_.size());
            if (victim.freed > 0 && victim.is_better_than(best)) best = victim;
        }
        if (best.sequence == nullptr) {
            // Nobody to take from. In flight it may still end by itself; otherwise it makes room for others.
            if (is_in_flight) return false;
            best = {candidate.sequence, place, 0.0, 0};
        }
        if (best.place < order_.size()) order_[best.place]->is_gone = true;
        choice.preempted_ids.push_back(best.sequence->id);
        state.preempt(*best.sequence);
        if (best.sequence == candidate.sequence) return false;
    }
    return true;
}

}  // namespace deepinfer
