#include "sampling_inputs.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <unordered_map>

#include "check.hpp"

namespace deepinfer {
namespace {

/// Penalty triplets of one row: the committed history and the drafts before the row.
void add_penalties(SparseInputs& sparse, const Sequence& sequence, int32_t row, int32_t num_drafts_before) {
    const TokenHistory& history = *sequence.history;
    const size_t first = sparse.penalty_tokens.size();
    sparse.penalty_tokens.insert(sparse.penalty_tokens.end(), history.tokens.begin(), history.tokens.end());
    sparse.penalty_counts.insert(sparse.penalty_counts.end(), history.counts.begin(), history.counts.end());
    for (int32_t j = 0; j < num_drafts_before; ++j) {
        const int32_t draft = sequence.drafts[j];
        const auto known = history.index.find(draft);
        size_t place = sparse.penalty_tokens.size();
        if (known != history.index.end()) {
            place = first + static_cast<size_t>(known->second);
        } else {
            const auto begin =
                sparse.penalty_tokens.begin() + static_cast<int64_t>(first + history.tokens.size());
            const auto found = std::find(begin, sparse.penalty_tokens.end(), draft);
            place = static_cast<size_t>(found - sparse.penalty_tokens.begin());
        }
        if (place == sparse.penalty_tokens.size()) {
            sparse.penalty_tokens.push_back(draft);
            sparse.penalty_counts.push_back(0);
        }
        ++sparse.penalty_counts[place];
    }
    sparse.penalty_rows.resize(sparse.penalty_tokens.size(), row);
}

void add_bans(SparseInputs& sparse, const SequenceParams& params, int32_t row, int32_t output_index) {
    const auto ban = [&](int32_t token) {
        sparse.ban_rows.push_back(row);
        sparse.ban_tokens.push_back(token);
    };
    const bool is_too_short = output_index < params.min_tokens;
    if (is_too_short) {
        for (int32_t token : params.stop_token_ids) ban(token);
    }
    if (params.eos_token_id >= 0 &&
        ((is_too_short && !params.ignore_eos) || output_index < params.first_n_token_no_eos)) {
        ban(params.eos_token_id);
    }
}

/// What holds for every token of a request, whatever came before it.
void add_bias_and_allowed(SparseInputs& sparse, const SequenceParams& params, int32_t row) {
    for (size_t i = 0; i < params.bias_tokens.size(); ++i) {
        sparse.bias_rows.push_back(row);
        sparse.bias_tokens.push_back(params.bias_tokens[i]);
        sparse.bias_values.push_back(params.bias_values[i]);
    }
    if (!params.allowed_token_ids.empty()) {
        sparse.allowed_rows.push_back(row);
        sparse.allowed_tokens.insert(sparse.allowed_tokens.end(), params.allowed_token_ids.begin(),
                                     params.allowed_token_ids.end());
        sparse.allowed_offsets.push_back(static_cast<int32_t>(sparse.allowed_tokens.size()));
    }
}

void add_sampled_row(SparseInputs& sparse, const Sequence& sequence, int32_t row, int32_t output_index,
                     int32_t index) {
    if (sequence.history) add_penalties(sparse, sequence, row, index);
    add_bias_and_allowed(sparse, sequence.params, row);
    add_bans(sparse, sequence.params, row, output_index);
}

SparseInputs collect_sparse(const StepPlan& plan) {
    SparseInputs sparse;
    sparse.allowed_offsets.push_back(0);
    int32_t row = 0;
    for (const PlanSequence& entry : plan.sequences) {
        const Sequence& sequence = *entry.sequence;
        if (sequence.has_sparse_inputs && !sequence.is_finished() && !sequence.is_void) {
            for (int32_t j = 0; j < entry.num_scoring; ++j) {
                add_bias_and_allowed(sparse, sequence.params, row + j);
            }
            for (int32_t j = 0; j < entry.num_samples; ++j) {
                add_sampled_row(sparse, sequence, row + entry.num_scoring + j, sequence.num_outputs() + j,
                                std::min<int32_t>(j, sequence.num_drafts));
            }
        }
        row += entry.num_outputs();
    }
    return sparse;
}

/// Calls `visit(name, vector)` for every sparse array in buffer order.
template <typename Visitor>
void visit_sparse(const SparseInputs& sparse, const Visitor& visit) {
    visit("penalty_rows", sparse.penalty_rows);
    visit("penalty_tokens", sparse.penalty_tokens);
    visit("penalty_counts", sparse.penalty_counts);
    visit("bias_rows", sparse.bias_rows);
    visit("bias_tokens", sparse.bias_tokens);
    visit("bias_values", sparse.bias_values);
    visit("ban_rows", sparse.ban_rows);
    visit("ban_tokens", sparse.ban_tokens);
    visit("allowed_rows", sparse.allowed_rows);
    visit("allowed_offsets", sparse.allowed_offsets);
    visit("allowed_tokens", sparse.allowed_tokens);
}

template <typename T>
constexpr DataType type_of() {
    return std::is_same_v<T, float> ? DataType::kFloat32 : DataType::kInt32;
}

/// The dense arrays, one element per sampling row.
struct DenseRows {
    int64_t* seeds;
    int64_t* token_index;
    float* inv_temperature;
    float* top_p;
    float* min_p;
    float* repetition;
    float* presence;
    float* frequency;
    int32_t* top_k;
    int32_t* num_logprobs;
    int32_t* forced;
    int32_t* draft_ids;
    int32_t* is_ratio;

    /// A greedy row without any transform.
    void set_neutral(int32_t row, int64_t index, int32_t forced_token, int32_t logprobs) const {
        seeds[row] = 0;
        token_index[row] = index;
        inv_temperature[row] = 0.0f;
        top_p[row] = 1.0f;
        min_p[row] = 0.0f;
        repetition[row] = 1.0f;
        presence[row] = 0.0f;
        frequency[row] = 0.0f;
        top_k[row] = -1;
        num_logprobs[row] = logprobs;
        forced[row] = forced_token;
        draft_ids[row] = -1;
        is_ratio[row] = 0;
    }

    /// A row that scores a prompt token under the request's own distribution, but for penalties and bans,
    /// which depend on what was generated.
    void set_scoring(int32_t row, int64_t index, int32_t token, const SequenceParams& params) const {
        set_neutral(row, index, token, params.num_prompt_logprobs);
        inv_temperature[row] = params.inv_temperature;
        top_p[row] = params.top_p;
        top_k[row] = params.top_k;
        min_p[row] = params.min_p;
    }

    /// All sampled rows of a sequence.
    void set_sampled(int32_t row, const PlanSequence& entry) const {
        const Sequence& sequence = *entry.sequence;
        const SequenceParams& params = sequence.params;
        const int32_t count = entry.num_samples;
        std::fill_n(seeds + row, count, std::bit_cast<int64_t>(params.seed));
        std::iota(token_index + row, token_index + row + count, int64_t{sequence.length()});
        std::fill_n(inv_temperature + row, count, params.inv_temperature);
        std::fill_n(top_p + row, count, params.top_p);
        std::fill_n(min_p + row, count, params.min_p);
        std::fill_n(repetition + row, count, params.repetition);
        std::fill_n(presence + row, count, params.presence);
        std::fill_n(frequency + row, count, params.frequency);
        std::fill_n(top_k + row, count, params.top_k);
        std::fill_n(num_logprobs + row, count, params.num_logprobs);
        const int32_t first_output = sequence.num_outputs();
        const int32_t num_golden = static_cast<int32_t>(params.golden_token_ids.size());
        const int32_t num_drafts = std::max<int32_t>(0, std::min<int32_t>(count - 1, sequence.num_drafts));
        std::fill_n(forced + row, count, -1);
        for (int32_t j = 0; j < count && first_output + j < num_golden; ++j) {
            forced[row + j] = params.golden_token_ids[first_output + j];
        }
        std::copy_n(sequence.drafts.begin(), num_drafts, draft_ids + row);
        std::fill_n(draft_ids + row + num_drafts, count - num_drafts, -1);
        std::fill_n(is_ratio + row, count, sequence.is_ratio() ? 1 : 0);
    }
};

}  // namespace

Layout sampling_layout(StepPlan& plan) {
    if (!plan.has_sparse) {
        plan.sparse = collect_sparse(plan);
        plan.has_sparse = true;
    }
    Layout layout;
    layout.entries.reserve(24);
    for (const char* name : {"seeds", "token_index"}) layout.add(name, DataType::kInt64, plan.num_outputs);
    for (const char* name : {"inv_temperature", "top_p", "min_p", "repetition", "presence", "frequency"}) {
        layout.add(name, DataType::kFloat32, plan.num_outputs);
    }
    for (const char* name : {"top_k", "num_logprobs", "forced", "draft_ids", "is_ratio"}) {
        layout.add(name, DataType::kInt32, plan.num_outputs);
    }
    layout.add("row_offsets", DataType::kInt32, int64_t{plan.num_seqs()} + 1);
    visit_sparse(plan.sparse, [&]<typename T>(const char* name, const std::vector<T>& values) {
        layout.add(name, type_of<T>(), static_cast<int64_t>(values.size()));
    });
    return layout;
}

void fill_sampling(const CoreConfig& config, StepPlan& plan, std::span<std::byte> buffer) {
    const Layout layout = sampling_layout(plan);
    BufferWriter writer(layout, buffer);
    DenseRows rows{};
    rows.seeds = writer.next<int64_t>("seeds");
    rows.token_index = writer.next<int64_t>("token_index");
    rows.inv_temperature = writer.next<float>("inv_temperature");
    rows.top_p = writer.next<float>("top_p");
    rows.min_p = writer.next<float>("min_p");
    rows.repetition = writer.next<float>("repetition");
    rows.presence = writer.next<float>("presence");
    rows.frequency = writer.next<float>("frequency");
    rows.top_k = writer.next<int32_t>("top_k");
    rows.num_logprobs = writer.next<int32_t>("num_logprobs");
    rows.forced = writer.next<int32_t>("forced");
    rows.draft_ids = writer.next<int32_t>("draft_ids");
    rows.is_ratio = writer.next<int32_t>("is_ratio");
    int32_t* row_offsets = writer.next<int32_t>("row_offsets");
    int32_t row = 0;
    *row_offsets++ = 0;
    for (const PlanSequence& entry : plan.sequences) {
        const Sequence& sequence = *entry.sequence;
        for (int32_t j = 0; j < entry.num_scoring; ++j) {
            const int32_t target = entry.first_scoring + j + 1;
            const int32_t token = sequence.tokens[target];
            // An image token is outside of the vocabulary: nothing to force, and commit ignores the value.
            rows.set_scoring(row++, target, config.is_image_token(token) ? -1 : token, sequence.params);
        }
        if (sequence.is_finished() || sequence.is_void) {
            for (int32_t j = 0; j < entry.num_samples; ++j) {
                rows.set_neutral(row + j, int64_t{entry.start} + j + 1, -1, -1);
            }
        } else {
            rows.set_sampled(row, entry);
        }
        row += entry.num_samples;
        *row_offsets++ = row;
    }
    visit_sparse(plan.sparse, [&]<typename T>(const char* name, const std::vector<T>& values) {
        std::copy(values.begin(), values.end(), writer.next<T>(name));
    });
}

}  // namespace deepinfer
