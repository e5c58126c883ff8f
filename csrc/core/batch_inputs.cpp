#include "batch_inputs.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "async_remap.hpp"
#include "check.hpp"
#include "kv_inputs.hpp"
#include "ngram.hpp"

namespace deepinfer {
namespace {

constexpr int64_t kAlignment = 64;

int64_t size_of(DataType dtype) { return dtype == DataType::kInt64 ? 8 : 4; }

/// Windows of all rows of a chunk. A token is looked up once; a row copies its neighbours.
void fill_chunk_windows(const CoreConfig& config, const CompressedVocab& vocab, const PlanSequence& entry,
                        int32_t* out) {
    const std::vector<int32_t>& tokens = entry.sequence->tokens;
    const int32_t width = config.max_ngram;
    fill_window(config, vocab, tokens, entry.start, width, out);
    for (int32_t row = 1; row < entry.num_rows; ++row) {
        const int32_t* previous = out;
        out += width;
        const int32_t id = tokens[entry.start + row];
        if (config.is_image_token(id)) {
            std::fill_n(out, width, vocab.pad_id);
        } else {
            out[0] = vocab(id);
            std::copy_n(previous, width - 1, out + 1);
        }
    }
}

/// Windows of the last token and the drafts behind it.
void fill_decode_windows(const CoreConfig& config, const CompressedVocab& vocab, const PlanSequence& entry,
                         int32_t* out) {
    const int32_t width = config.max_ngram;
    if (entry.remap >= 0) {
        std::fill_n(out, int64_t{entry.num_rows} * width, vocab.pad_id);
        return;
    }
    const Sequence& sequence = *entry.sequence;
    fill_window(config, vocab, sequence.tokens, entry.start, width, out);
    for (int32_t row = 1; row < entry.num_rows; ++row) {
        const int32_t* previous = out;
        out += width;
        out[0] = vocab(sequence.drafts[row - 1]);
        std::copy_n(previous, width - 1, out + 1);
    }
}

}  // namespace

void Layout::add(const char* name, DataType dtype, int64_t rows, int64_t columns) {
    entries.push_back({name, dtype, rows, columns, num_bytes});
    const int64_t count = rows * (columns < 0 ? 1 : columns);
    num_bytes += (count * size_of(dtype) + kAlignment - 1) / kAlignment * kAlignment;
}

BufferWriter::BufferWriter(const Layout& layout, std::span<std::byte> buffer)
    : layout_(layout), base_(buffer.data()) {
    if (static_cast<int64_t>(buffer.size()) < layout.num_bytes) {
        throw std::invalid_argument(
            concat("the buffer has ", buffer.size(), " bytes, this step needs ", layout.num_bytes));
    }
    if (reinterpret_cast<uintptr_t>(buffer.data()) % 8 != 0) {
        throw std::invalid_argument("the buffer must be aligned to 8 bytes");
    }
}

void* BufferWriter::next_array(const char* name, DataType dtype) {
    DI_CHECK(index_ < layout_.entries.size(), "no array left for ", name);
    const LayoutEntry& entry = layout_.entries[index_++];
    DI_CHECK(std::strcmp(entry.name, name) == 0 && entry.dtype == dtype, "expected ", entry.name, ", got ",
             name);
    return base_ + entry.offset;
}

template <>
int32_t* BufferWriter::next<int32_t>(const char* name) {
    return static_cast<int32_t*>(next_array(name, DataType::kInt32));
}
template <>
int64_t* BufferWriter::next<int64_t>(const char* name) {
    return static_cast<int64_t*>(next_array(name, DataType::kInt64));
}
template <>
float* BufferWriter::next<float>(const char* name) {
    return static_cast<float*>(next_array(name, DataType::kFloat32));
}

Layout batch_layout(const CoreConfig& config, const StepPlan& plan) {
    Layout layout;
    layout.entries.reserve(20);
    layout.add("input_ids", DataType::kInt32, plan.num_rows);
    layout.add("positions", DataType::kInt32, plan.num_rows);
    layout.add("row_seq", DataType::kInt32, plan.num_rows);
    layout.add("ngram_ids", DataType::kInt32, plan.num_rows, config.max_ngram);
    layout.add("output_rows", DataType::kInt32, plan.num_outputs);
    add_kv_layout(plan, layout);
    add_remap_layout(config, plan, layout);
    return layout;
}

void fill_batch(const CoreConfig& config, const CompressedVocab& vocab, const StepPlan& plan,
                std::span<std::byte> buffer) {
    const Layout layout = batch_layout(config, plan);
    BufferWriter writer(layout, buffer);
    int32_t* input_ids = writer.next<int32_t>("input_ids");
    int32_t* positions = writer.next<int32_t>("positions");
    int32_t* row_seq = writer.next<int32_t>("row_seq");
    int32_t* ngram_ids = writer.next<int32_t>("ngram_ids");
    int32_t* output_rows = writer.next<int32_t>("output_rows");
    int32_t first_row = 0;
    for (int32_t s = 0; s < plan.num_seqs(); ++s) {
        const PlanSequence& entry = plan.sequences[s];
        const Sequence& sequence = *entry.sequence;
        const int32_t count = entry.num_rows;
        if (plan.is_prefill()) {
            std::copy_n(sequence.tokens.begin() + entry.start, count, input_ids);
        } else if (entry.remap >= 0) {
            std::fill_n(input_ids, count, 0);  // only the device knows them
        } else {
            input_ids[0] = sequence.tokens[entry.start];
            std::copy_n(sequence.drafts.begin(), count - 1, input_ids + 1);
        }
        std::iota(positions, positions + count, entry.start);
        std::fill_n(row_seq, count, s);
        if (config.max_ngram > 0) {
            if (plan.is_prefill()) {
                fill_chunk_windows(config, vocab, entry, ngram_ids);
            } else {
                fill_decode_windows(config, vocab, entry, ngram_ids);
            }
        }
        std::iota(output_rows, output_rows + entry.num_scoring,
                  first_row + entry.first_scoring - entry.start);
        output_rows += entry.num_scoring;
        std::iota(output_rows, output_rows + entry.num_samples, first_row + count - entry.num_samples);
        output_rows += entry.num_samples;
        input_ids += count;
        positions += count;
        row_seq += count;
        ngram_ids += int64_t{count} * config.max_ngram;
        first_row += count;
    }
    fill_kv_inputs(config, plan, writer);
    fill_remap_inputs(config, vocab, plan, writer);
}

}  // namespace deepinfer
