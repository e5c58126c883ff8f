#include "prefill_policy.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

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
    // What a store outside gives to a sequence that bounded replay cuts must lie before its decoder windows.
    const int32_t replayed =
        sequence.replay_start(config.replay_keep_tokens) / config.block_size * config.block_size;
    if (state.prefix_cache.is_reporting() && replayed > start) border = std::min(border, replayed);
    const int32_t interval = config.prefix_state_interval;
    if (interval > 0) border = std::min(border, (start / interval + 1) * interval);
    return border;
}

/// Sequences that are being prefilled, by their tokens: an equal one waits for them, and so does one that
/// begins alike.
class Leaders {
public:
    explicit Leaders(const CoreState& state) : cache_(state.prefix_cache), size_(state.config.block_size) {
        if (!cache_.is_enabled()) return;
        for (Sequence* sequence : state.partial) {
            leaders_.emplace(cache_.key_of(*sequence), Leader{sequence, false});
        }
        if (state.waiting.size() == state.partial.size()) return;  // nobody to wait for them
        for (Sequence* sequence : state.partial) {
            const int32_t start = sequence->next_computed();
            add_path(*sequence, next_state_border(state, *sequence, start, sequence->fork_border), -1);
        }
        for (const auto& plan : state.in_flight) {
            if (!plan->is_prefill()) continue;
            for (const Snapshot& snapshot : plan->snapshots) {
                add_path(*snapshot.sequence, snapshot.border, -1);
            }
        }
    }

    /// Whether a waiting sequence with this hit had better wait for a state that somebody is going to leave.
    /// A chunk that opens its prompt in this step is cut where the two part, in favour of `budgets`.
    bool has_better(const CoreState& state, Sequence& sequence, const PrefixHit& hit, PrefillChoice& choice,
                    Budgets& budgets) {
        const int32_t most = (sequence.length() - 1) / size_;
        if (paths_.empty() || sequence.still_scores()) return false;
        // Blocks behind the hit may be known, without a state, to a sequence that computes them once more.
        for (const int32_t num_tokens : {hit.num_tokens, hit.num_known}) {
            const int32_t first = num_tokens / size_;
            if (first >= most) continue;
            const auto found = paths_.find(cache_.hash_of(sequence, first));
            if (found == paths_.end()) continue;
            for (const Path& path : found->second) {
                Sequence& other = *path.sequence;
                const int32_t last = std::min(most, other.length() / size_);
                int32_t common = first + 1;
                while (common < last && cache_.hash_of(sequence, common) == cache_.hash_of(other, common))
                    ++common;
                const int32_t end = common * size_;
                if (path.chunk >= 0) cut(state, choice.chunks[path.chunk], end, budgets);
                const int32_t border =
                    path.chunk >= 0 ? choice.chunks[path.chunk].state_border : path.border;
                if (hit.num_tokens < border && border <= end) return true;
            }
        }
        return false;
    }

    /// Somebody is forked from the last chunk of this one: it has to stay what it is.
    void settle(const Sequence& sequence) { settled_.insert(&sequence); }

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

    /// `index` of the chunk when it opens its prompt, else -1.
    void add_chunk(Sequence& sequence, bool is_last, int32_t index) {
        if (!cache_.is_enabled()) return;
        if (index >= 0) {
            add_path(sequence, 0, index);
            any_opens_ = true;
        }
        const auto entry = leaders_.emplace(cache_.key_of(sequence), Leader{&sequence, false}).first;
        if (entry->second.sequence != &sequence || !is_last) return;
        entry->second.ends = true;
        any_ends_ = true;
    }

    /// Whether somebody ends his prompt in this step, so that equal ones can be forked.
    bool any_ends() const { return any_ends_; }
    /// Whether somebody opens his prompt in this step, so that others may wait for him.
    bool any_opens() const { return any_opens_; }

private:
    /// A sequence that computes some block, and the next border at which its state is kept.
    struct Path {
        Sequence* sequence;
        int32_t border;
        int32_t chunk;  ///< index among the chunks of this step when it may still be cut; -1: it may not
    };

    void add_path(Sequence& sequence, int32_t border, int32_t chunk) {
        if (border == 0 && chunk < 0) return;
        for (int32_t index = sequence.num_computed / size_; index < sequence.length() / size_; ++index) {
            std::vector<Path>& paths = paths_[cache_.hash_of(sequence, index)];
            if (paths.size() < kMaxPaths) paths.push_back({&sequence, border, chunk});
        }
    }

    /// Lets a chunk lead up to the border `end` if that comes before the one it leads up to.
    void cut(const CoreState& state, PrefillChoice::Chunk& chunk, int32_t end, Budgets& budgets) {
        const CoreConfig& config = state.config;
        if (!config.chunked_prefill || chunk.sequence->still_scores()) return;
        if (settled_.contains(chunk.sequence)) return;
        if (end <= chunk.start || (chunk.state_border > 0 && chunk.state_border <= end)) return;
        if (end >= chunk.sequence->length()) return;  // its end is a border, at which it is kept anyway
        chunk.state_border = end;
        chunk.is_cut = true;
        const int32_t surplus = chunk.start + chunk.num_rows - end;
        if (surplus <= 0) return;
        const auto found = leaders_.find(cache_.key_of(*chunk.sequence));
        if (found != leaders_.end() && found->second.sequence == chunk.sequence) found->second.ends = false;
        chunk.num_rows -= surplus;
        budgets.tokens += surplus;
        if (budgets.flops >= 0.0) budgets.flops += state.work.attention_flops(end, end + surplus);
    }

    static constexpr size_t kMaxPaths = 4;  ///< more sequences that compute one block need not be looked at

    const PrefixCache& cache_;
    const int32_t size_;
    std::unordered_map<PrefixHash, Leader> leaders_;
    std::unordered_map<PrefixHash, std::vector<Path>> paths_;  ///< by block
    std::unordered_set<const Sequence*> settled_;
    bool any_ends_ = false, any_opens_ = false;
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
        const bool is_of_use = leaders.any_ends() || leaders.any_opens();
        if (is_full && (!is_of_use || ++num_passed_by > kMaxSkipped)) break;
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
            const int32_t need = config.blocks_for(length);
            if (leader != nullptr) {
                num_taken = need - (length - 1) / config.block_size;
            } else {
                hit = state.prefix_cache.find(*sequence);
                if (leaders.has_better(state, *sequence, hit, choice, budgets) || is_full) continue;
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
            leaders.settle(*leader->sequence);
        } else {
            if (is_full || length > budgets.sum_seqlen_k) continue;
            const int32_t start = is_admission ? hit.num_tokens : sequence->next_computed();
            int32_t rows = chunk_size(state, budgets, start, length - start, choice.chunks.empty());
            if (rows == 0) continue;
            const int32_t fork_border = is_admission ? hit.num_known : sequence->fork_border;
            const int32_t border = next_state_border(state, *sequence, start, fork_border);
            if (border > 0) rows = std::min(rows, border - start);
            const int32_t index = is_admission ? static_cast<int32_t>(choice.chunks.size()) : -1;
            choice.chunks.push_back({sequence, start, rows, is_admission, std::move(hit), border});
            leaders.add_chunk(*sequence, start + rows == length, index);
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

std::vector<Sequence*> choose_computed(CoreState& state, bool is_swapped) {
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
        const bool is_wanted = sequence->is_computed && (sequence->swap_bytes > 0) == is_swapped;
        if (!fits || !is_wanted) {
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
