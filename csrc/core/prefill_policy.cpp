#include "prefill_policy.hpp"

#include <algorithm>
#include <unordered_map>

namespace deepinfer {
namespace {

/// How many sequences without room a step looks past; more would make a full pool cost O(waiting).
constexpr size_t kMaxSkipped = 256;

/// Blocks that a sequence of `length` tokens holding `num_blocks` lacks to grow by the headroom.
int32_t growth(const CoreConfig& config, const Sequence& sequence, int32_t length, int32_t num_blocks) {
    const int64_t grown =
        std::min<int64_t>(int64_t{length} + config.admission_headroom_tokens, sequence.limit_length - 1);
    return std::max(0, config.blocks_for(static_cast<int32_t>(grown)) - num_blocks);
}

/// Blocks that the running sequences lack to grow by the headroom.
int32_t growth_of_running(const CoreState& state) {
    int32_t sum = 0;
    for (const Sequence* sequence : state.running) {
        sum += growth(state.config, *sequence, sequence->next_length(), sequence->num_blocks());
    }
    return sum;
}

/// What is left of the step's budgets.
struct Budgets {
    int32_t tokens;
    int64_t sum_seqlen_k;
    double flops;  ///< negative: no limit
};

/// Rows of the next chunk of `sequence` under the budgets; 0 when it must wait for another step.
int32_t chunk_size(const CoreState& state, const Budgets& budgets, int32_t start, int32_t remaining,
                   bool is_first) {
    const CoreConfig& config = state.config;
    int32_t rows = std::min(remaining, budgets.tokens);
    if (budgets.flops >= 0.0) {
        int32_t affordable = state.work.max_queries(start, rows, budgets.flops);
        // The first sequence always moves on by a block, however expensive its attention has become.
        if (is_first)
            affordable =
                std::max(affordable, std::min(rows, config.chunked_prefill ? config.block_size : rows));
        rows = affordable;
    }
    if (rows == remaining) return rows;
    if (!config.chunked_prefill) return 0;
    return is_first || rows >= config.min_prefill_chunk ? rows : 0;
}

/// The next border behind `start` at which the state of `sequence` is to be kept; 0: none.
int32_t next_state_border(const CoreState& state, const Sequence& sequence, int32_t start,
                          int32_t fork_border) {
    const CoreConfig& config = state.config;
    // A prompt that is scored ends its chunks anywhere, and a whole prompt has no borders.
    if (!config.prefix_caching || !config.chunked_prefill || sequence.still_scores()) return 0;
    int32_t border = (sequence.length() - 1) / config.block_size * config.block_size;
    if (border <= start) return 0;
    if (fork_border > start) border = std::min(border, fork_border);
    const int32_t interval = config.prefix_state_interval;
    if (interval > 0) border = std::min(border, (start / interval + 1) * interval);
    return border;
}

/// Sequences that are being prefilled, by their tokens: an equal one waits for them.
class Leaders {
public:
    explicit Leaders(const CoreState& state) : cache_(state.prefix_cache) {
        if (!cache_.is_enabled()) return;
        for (Sequence* sequence : state.partial) {
            leaders_.emplace(cache_.key_of(*sequence), Leader{sequence, false});
        }
    }

    struct Leader {
        Sequence* sequence;
        bool ends;  ///< its last chunk is in this step
    };

    /// Null when nobody does the work of `sequence` yet.
    const Leader* find(Sequence& sequence) const {
        if (leaders_.empty() || sequence.still_scores()) return nullptr;
        const auto found = leaders_.find(cache_.key_of(sequence));
        if (found == leaders_.end()) return nullptr;
        const Sequence& leader = *found->second.sequence;
        const bool is_equal = &leader != &sequence && leader.tokens == sequence.tokens &&
                              cache_.may_share(leader, sequence);
        return is_equal ? &found->second : nullptr;
    }

    void add_chunk(Sequence& sequence, bool is_last) {
        if (!cache_.is_enabled()) return;
        const auto entry = leaders_.emplace(cache_.key_of(sequence), Leader{&sequence, false}).first;
        if (entry->second.sequence != &sequence || !is_last) return;
        entry->second.ends = true;
        any_ends_ = true;
    }

    /// Whether somebody ends his prompt in this step, so that equal ones can be forked.
    bool any_ends() const { return any_ends_; }

private:
    const PrefixCache& cache_;
    std::unordered_map<PrefixHash, Leader> leaders_;
    bool any_ends_ = false;
};

}  // namespace

PrefillChoice choose_prefill(const CoreState& state) {
    const CoreConfig& config = state.config;
    PrefillChoice choice;
    if (state.waiting.empty()) return choice;
    Budgets budgets{config.max_num_batched_tokens, config.max_sum_seqlen_k,
                    config.max_prefill_tflops > 0.0 ? config.max_prefill_tflops * 1e12 : -1.0};
    int32_t free_blocks = state.blocks.num_free();
    int32_t free_slots = state.slots.num_free();
    int32_t admitted = state.num_admitted();
    int32_t headroom = growth_of_running(state);
    bool pool_is_idle = free_blocks == config.num_blocks - 1;
    bool is_closed = false;  // somebody has been overtaken too often: no admission behind him
    size_t num_partial_left = state.partial.size();
    size_t num_passed_by = 0;  // sequences that the budgets leave no room for
    Leaders leaders(state);
    std::vector<Sequence*> blocked;

    for (const auto& [id, sequence] : state.waiting) {
        const bool is_full = budgets.tokens == 0 || budgets.sum_seqlen_k <= 0;
        if (is_full && (!leaders.any_ends() || ++num_passed_by > kMaxSkipped)) break;
        if (sequence->is_evicting) continue;
        const bool is_admission = sequence->state_slot == 0;
        if (!is_admission) --num_partial_left;
        const int32_t length = sequence->length();
        int32_t own_growth = 0, num_taken = 0;
        PrefixHit hit;
        const Leaders::Leader* leader = nullptr;
        if (is_admission) {
            if (is_closed || admitted >= config.max_num_seqs || blocked.size() >= kMaxSkipped) {
                if (num_partial_left == 0) break;
                continue;
            }
            if (sequence->is_computed) {  // `choose_computed` found no room
                is_closed = sequence->num_overtaken >= config.max_overtakes;
                blocked.push_back(sequence);
                continue;
            }
            leader = leaders.find(*sequence);
            if (leader != nullptr && !leader->ends) continue;
            if (leader == nullptr && is_full) continue;
            const int32_t need = config.blocks_for(length);
            if (leader != nullptr) {
                num_taken = need - (length - 1) / config.block_size;
            } else {
                hit = state.prefix_cache.find(*sequence);
                num_taken = need - static_cast<int32_t>(hit.blocks.size()) +
                            state.blocks.num_unheld(hit.blocks);
            }
            own_growth = growth(config, *sequence, length, need);
            const bool fits = free_slots > 0 && num_taken <= free_blocks &&
                              (pool_is_idle || int64_t{num_taken} + own_growth + headroom <= free_blocks);
            if (!fits) {
                is_closed = sequence->num_overtaken >= config.max_overtakes;
                blocked.push_back(sequence);
                continue;
            }
        }
        if (leader != nullptr) {
            choice.forks.push_back({sequence, leader->sequence});
        } else {
            if (is_full || length > budgets.sum_seqlen_k) continue;
            const int32_t start = is_admission ? hit.num_tokens : sequence->next_computed();
            int32_t rows = chunk_size(state, budgets, start, length - start, choice.chunks.empty());
            if (rows == 0) continue;
            const int32_t fork_border = is_admission ? hit.num_known : sequence->fork_border;
            const int32_t border = next_state_border(state, *sequence, start, fork_border);
            if (border > 0) rows = std::min(rows, border - start);
            leaders.add_chunk(*sequence, start + rows == length);
            choice.chunks.push_back({sequence, start, rows, is_admission, std::move(hit), border});
            budgets.tokens -= rows;
            budgets.sum_seqlen_k -= length;
            if (budgets.flops >= 0.0) {
                budgets.flops =
                    std::max(0.0, budgets.flops - state.work.attention_flops(start, start + rows));
            }
        }
        if (is_admission) {
            free_blocks -= num_taken;
            --free_slots;
            ++admitted;
            headroom += own_growth;
            pool_is_idle = false;
            choice.passed.insert(choice.passed.end(), blocked.begin(), blocked.end());
        }
    }
    return choice;
}

std::vector<Sequence*> choose_computed(CoreState& state) {
    const CoreConfig& config = state.config;
    std::vector<Sequence*> chosen, blocked;
    int32_t free_blocks = state.blocks.num_free();
    int32_t free_slots = state.slots.num_free();
    int32_t admitted = state.num_admitted();
    int32_t headroom = growth_of_running(state);
    bool pool_is_idle = free_blocks == config.num_blocks - 1;
    for (const auto& [id, sequence] : state.waiting) {
        if (admitted >= config.max_num_seqs || free_slots == 0 || blocked.size() >= kMaxSkipped) break;
        if (sequence->is_evicting || sequence->state_slot != 0) continue;
        const int32_t need = config.blocks_for(sequence->length() - 1);
        const int32_t own_growth = growth(config, *sequence, sequence->length(), need);
        const bool fits = need <= free_blocks &&
                          (pool_is_idle || int64_t{need} + own_growth + headroom <= free_blocks);
        if (!fits || !sequence->is_computed) {
            if (sequence->num_overtaken >= config.max_overtakes) break;
            blocked.push_back(sequence);
            continue;
        }
        free_blocks -= need;
        --free_slots;
        ++admitted;
        headroom += own_growth;
        pool_is_idle = false;
        chosen.push_back(sequence);
        for (Sequence* passed : blocked) ++passed->num_overtaken;
    }
    return chosen;
}

}  // namespace deepinfer
