#include "kv_inputs.hpp"

#include <algorithm>

namespace deepinfer {
namespace {

void fill_copies(const std::vector<Copy>& copies, int32_t* out) {
    for (const Copy& copy : copies) {
        *out++ = copy.source;
        *out++ = copy.target;
    }
}

}  // namespace

void add_kv_layout(const StepPlan& plan, Layout& layout) {
    const int64_t num_seqs = plan.num_seqs();
    layout.add("cu_seqlens_q", DataType::kInt32, num_seqs + 1);
    layout.add("seqlens_q", DataType::kInt32, num_seqs);
    layout.add("seqlens_k", DataType::kInt32, num_seqs);
    layout.add("state_slots", DataType::kInt32, num_seqs);
    layout.add("total_lens", DataType::kInt32, num_seqs);
    layout.add("keep_all", DataType::kInt32, num_seqs);
    layout.add("window_starts", DataType::kInt32, num_seqs);
    layout.add("block_tables", DataType::kInt32, num_seqs, plan.max_blocks);
    if (!plan.has_copies()) return;
    layout.add("slot_copies", DataType::kInt32, static_cast<int64_t>(plan.slot_copies.size()), 2);
    layout.add("state_copies", DataType::kInt32, static_cast<int64_t>(plan.state_copies.size()), 2);
    layout.add("block_copies", DataType::kInt32, static_cast<int64_t>(plan.block_copies.size()), 2);
}

void fill_kv_inputs(const CoreConfig& config, const StepPlan& plan, BufferWriter& writer) {
    int32_t* cu_seqlens_q = writer.next<int32_t>("cu_seqlens_q");
    int32_t* seqlens_q = writer.next<int32_t>("seqlens_q");
    int32_t* seqlens_k = writer.next<int32_t>("seqlens_k");
    int32_t* state_slots = writer.next<int32_t>("state_slots");
    int32_t* total_lens = writer.next<int32_t>("total_lens");
    int32_t* keep_all = writer.next<int32_t>("keep_all");
    int32_t* window_starts = writer.next<int32_t>("window_starts");
    int32_t* table = writer.next<int32_t>("block_tables");
    int32_t row = 0;
    *cu_seqlens_q++ = 0;
    for (const PlanSequence& entry : plan.sequences) {
        row += entry.num_rows;
        *cu_seqlens_q++ = row;
        *seqlens_q++ = entry.num_rows;
        *seqlens_k++ = entry.end();
        *state_slots++ = entry.sequence->state_slot;
        // A prompt chunk may skip decoder rows only when neither later tokens nor a state that is going to be
        // kept needs them, so it must know how far they are.
        *total_lens++ = plan.is_prefill() ? entry.total_length : entry.end();
        // Rows that were scored before a preemption are history of the ones that still are to be.
        *keep_all++ = plan.is_prefill() && entry.sequence->still_scores() ? 1 : 0;
        *window_starts++ = entry.sequence->replay_start(config.replay_keep_tokens);
        const std::vector<int32_t>& blocks = entry.sequence->blocks;
        const size_t used = std::min(blocks.size(), static_cast<size_t>(config.blocks_for(entry.max_end())));
        int32_t* const end = table + plan.max_blocks;
        std::fill(std::copy_n(blocks.begin(), used, table), end, 0);
        table = end;
    }
    if (!plan.has_copies()) return;
    fill_copies(plan.slot_copies, writer.next<int32_t>("slot_copies"));
    fill_copies(plan.state_copies, writer.next<int32_t>("state_copies"));
    fill_copies(plan.block_copies, writer.next<int32_t>("block_copies"));
}

}  // namespace deepinfer
