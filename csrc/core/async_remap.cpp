#include "async_remap.hpp"

#include <algorithm>

#include "ngram.hpp"

namespace deepinfer {

void add_remap_layout(const CoreConfig& config, const StepPlan& plan, Layout& layout) {
    const int64_t num_seqs = config.async_scheduling ? plan.num_seqs() : 0;
    layout.add("remap", DataType::kInt32, num_seqs);
    layout.add("committed_lens", DataType::kInt32, num_seqs);
    layout.add("ngram_history", DataType::kInt32, num_seqs, std::max(0, config.max_ngram - 1));
    layout.add("max_seqlens_q", DataType::kInt32, plan.can_redistribute ? num_seqs : 0);
    layout.add("confidence_odds", DataType::kFloat32, static_cast<int64_t>(plan.confidence_odds.size()));
}

void fill_remap_inputs(const CoreConfig& config, const CompressedVocab& vocab, const StepPlan& plan,
                       BufferWriter& writer) {
    int32_t* remap = writer.next<int32_t>("remap");
    int32_t* committed_lens = writer.next<int32_t>("committed_lens");
    int32_t* history = writer.next<int32_t>("ngram_history");
    int32_t* max_seqlens_q = writer.next<int32_t>("max_seqlens_q");
    float* confidence_odds = writer.next<float>("confidence_odds");
    if (plan.can_redistribute) {
        for (const PlanSequence& entry : plan.sequences) *max_seqlens_q++ = entry.max_rows;
        std::copy(plan.confidence_odds.begin(), plan.confidence_odds.end(), confidence_odds);
    }
    if (!config.async_scheduling) return;
    const int32_t width = std::max(0, config.max_ngram - 1);
    for (const PlanSequence& entry : plan.sequences) {
        *remap++ = entry.remap;
        *committed_lens++ = entry.known_length;
        fill_window(config, vocab, entry.sequence->tokens, entry.known_length - 1, width, history);
        history += width;
    }
}

}  // namespace deepinfer
