#include "async_remap.hpp"

#include "ngram.hpp"

namespace deepinfer {

void add_remap_layout(const CoreConfig& config, const StepPlan& plan, Layout& layout) {
    const int64_t num_seqs = config.async_scheduling ? plan.num_seqs() : 0;
    layout.add("remap", DataType::kInt32, num_seqs);
    layout.add("committed_lens", DataType::kInt32, num_seqs);
    layout.add("ngram_history", DataType::kInt32, num_seqs, std::max(0, config.max_ngram - 1));
}

void fill_remap_inputs(const CoreConfig& config, const CompressedVocab& vocab, const StepPlan& plan,
                       BufferWriter& writer) {
    int32_t* remap = writer.next<int32_t>("remap");
    int32_t* committed_lens = writer.next<int32_t>("committed_lens");
    int32_t* history = writer.next<int32_t>("ngram_history");
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
