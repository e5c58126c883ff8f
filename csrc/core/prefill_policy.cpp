#include "prefill_policy.hpp"

#include <algorithm>

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
    int32_t headroom = 0;
    for (const Sequence* sequence : state.running) {
        headroom += growth(config, *sequence, sequence->next_length(), sequence->num_blocks());
    }
    bool pool_is_idle = free_blocks == config.num_blocks - 1;
    bool is_closed = false;  // somebody has been overtaken too often: no admission behind him
    size_t num_partial_left = state.partial.size();
    std::vector<Sequence*> blocked;

    for (const auto& [id, sequence] : state.waiting) {
        if (budgets.tokens == 0 || budgets.sum_seqlen_k <= 0) break;
        if (sequence->is_evicting) continue;
        const bool is_admission = sequence->state_slot == 0;
        if (!is_admission) --num_partial_left;
        const int32_t length = sequence->length();
        int32_t own_growth = 0;
        if (is_admission) {
            if (is_closed || admitted >= config.max_num_seqs || blocked.size() >= kMaxSkipped) {
                if (num_partial_left == 0) break;
                continue;
            }
            const int32_t need = config.blocks_for(length);
            own_growth = growth(config, *sequence, length, need);
            const bool fits = free_slots > 0 && need <= free_blocks &&
                              (pool_is_idle || int64_t{need} + own_growth + headroom <= free_blocks);
            if (!fits) {
                is_closed = sequence->num_overtaken >= config.max_overtakes;
                blocked.push_back(sequence);
                continue;
            }
        }
        if (length > budgets.sum_seqlen_k) continue;
        const int32_t start = sequence->next_computed();
        const int32_t rows = chunk_size(state, budgets, start, length - start, choice.chunks.empty());
        if (rows == 0) continue;
        choice.chunks.push_back({sequence, start, rows, is_admission});
        budgets.tokens -= rows;
        budgets.sum_seqlen_k -= length;
        if (budgets.flops >= 0.0) {
            budgets.flops = std::max(0.0, budgets.flops - state.work.attention_flops(start, start + rows));
        }
        if (is_admission) {
            free_blocks -= config.blocks_for(length);
            --free_slots;
            ++admitted;
            headroom += own_growth;
            pool_is_idle = false;
            choice.passed.insert(choice.passed.end(), blocked.begin(), blocked.end());
        }
    }
    return choice;
}

}  // namespace deepinfer
