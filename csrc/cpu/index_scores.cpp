#include "cpu/index_scores.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu/linear.hpp"

namespace deepinfer::cpu {
namespace {

constexpr int64_t kBlockRows = 16;  // rows of a sequence that share decoded keys
constexpr int64_t kPartColumns = 1024;  // columns of a row, scored together

/// Consecutive rows of one sequence and one of its blocks.
struct Task {
    int64_t row, num_rows, block;
};

void check(const IndexScoresArgs& a) {
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t seq = a.row_seq[row], visible = a.num_visible[row];
        if (seq < 0 || seq >= a.sequences) throw std::out_of_range("a row's sequence is not in the block tables");
        if (visible < 0 || visible > a.max_visible || visible > a.table_width * a.entries) {
            throw std::out_of_range("a row sees more entries than the result or the block table holds");
        }
        for (int64_t i = 0; i < ceil_div(visible, a.entries); ++i) {
            const int64_t block = a.block_tables[seq * a.table_stride + i];
            if (block < 0 || block >= a.blocks) throw std::out_of_range("a block id lies past the pool");
        }
    }
}

/// float32 queries and weights of all rows, heads padded with zeros to whole register blocks.
struct Queries {
    const float* q;
    const float* weights;
    int64_t heads;
};

Queries prepare(Context& context, const Kernels& kernels, const IndexScoresArgs& a) {
    const int64_t heads = ceil_div(a.heads, kernels.index_heads) * kernels.index_heads;
    const int64_t q_bytes = kIndexWidth * (a.q_dtype == DType::kFloat32 ? 4 : 2);
    const int64_t weight_bytes = a.weights_dtype == DType::kFloat32 ? 4 : 2;
    float* q = context.inputs.reserve<float>(a.rows * heads * (kIndexWidth + 1));
    float* weights = q + a.rows * heads * kIndexWidth;
    for (int64_t row = 0; row < a.rows; ++row) {
        float* to = q + row * heads * kIndexWidth;
        kernels.prepare_row(static_cast<const char*>(a.q) + row * a.heads * q_bytes, a.q_dtype, false,
                            static_cast<int>(a.heads * kIndexWidth), to);
        std::fill(to + a.heads * kIndexWidth, to + heads * kIndexWidth, 0.0f);
        kernels.prepare_row(static_cast<const char*>(a.weights) + row * a.heads * weight_bytes, a.weights_dtype,
                            false, static_cast<int>(a.heads), weights + row * heads);
        std::fill(weights + row * heads + a.heads, weights + (row + 1) * heads, 0.0f);
    }
    return {q, weights, heads};
}

/// Decodes entries `first ... first + count - 1` of a block into the lanes of a panel; other lanes are arbitrary.
void fill_panel(const Kernels& kernels, const IndexScoresArgs& a, int64_t block, int64_t first, int64_t count,
                float* panel) {
    const uint8_t* codes = a.codes + block * a.code_block_stride + first * a.code_entry_stride;
    if (a.scales == nullptr) {
        std::memset(panel, 0, sizeof(float) * kIndexWidth * kPanelKeys);
        for (int64_t key = 0; key < count; ++key) {
            const float* from = reinterpret_cast<const float*>(codes + key * a.code_entry_stride);
            for (int64_t c = 0; c < kIndexWidth; ++c) panel[c * kPanelKeys + key] = from[c];
        }
        return;
    }
    const uint8_t* scales = a.scales + block * a.scale_block_stride + first * a.scale_entry_stride;
    if (first + kPanelKeys <= a.entries) {
        kernels.decode_panel(codes, a.code_entry_stride, scales, a.scale_entry_stride, panel);
        return;
    }
    // The block ends inside the panel: whole panels read no further than its section.
    uint8_t code_copy[kPanelKeys * kIndexWidth / 2] = {}, scale_copy[kPanelKeys * kIndexWidth / 32] = {};
    for (int64_t key = 0; key < count; ++key) {
        std::memcpy(code_copy + key * kIndexWidth / 2, codes + key * a.code_entry_stride, kIndexWidth / 2);
        std::memcpy(scale_copy + key * kIndexWidth / 32, scales + key * a.scale_entry_stride, kIndexWidth / 32);
    }
    kernels.decode_panel(code_copy, kIndexWidth / 2, scale_copy, kIndexWidth / 32, panel);
}

/// Decodes the keys of any entries of a sequence into the first lanes of a panel; other lanes are arbitrary.
void gather_panel(const Kernels& kernels, const IndexScoresArgs& a, const int32_t* table,
                  const std::array<int64_t, kPanelKeys>& numbers, int count, float* panel) {
    uint8_t codes[kPanelKeys * kIndexWidth / 2] = {}, scales[kPanelKeys * kIndexWidth / 32] = {};
    if (a.scales == nullptr) std::memset(panel, 0, sizeof(float) * kIndexWidth * kPanelKeys);
    for (int64_t lane = 0; lane < count; ++lane) {
        const int64_t number = numbers[static_cast<size_t>(lane)];
        const int64_t block = table[number / a.entries], place = number % a.entries;
        const uint8_t* from = a.codes + block * a.code_block_stride + place * a.code_entry_stride;
        if (a.scales == nullptr) {
            const float* key = reinterpret_cast<const float*>(from);
            for (int64_t c = 0; c < kIndexWidth; ++c) panel[c * kPanelKeys + lane] = key[c];
            continue;
        }
        std::memcpy(codes + lane * kIndexWidth / 2, from, kIndexWidth / 2);
        std::memcpy(scales + lane * kIndexWidth / 32,
                    a.scales + block * a.scale_block_stride + place * a.scale_entry_stride, kIndexWidth / 32);
    }
    if (a.scales != nullptr) kernels.decode_panel(codes, kIndexWidth / 2, scales, kIndexWidth / 32, panel);
}

}  // namespace

void index_scores(Context& context, const IndexScoresArgs& a) {
    check(a);
    if (a.rows == 0 || a.max_visible == 0) return;
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();

    const auto [q, weights, heads] = prepare(context, kernels, a);
    std::vector<Task> tasks;
    for (int64_t row = 0; row < a.rows;) {
        int64_t end = row, visible = 0;
        while (end < a.rows && end - row < kBlockRows && a.row_seq[end] == a.row_seq[row]) {
            visible = std::max<int64_t>(visible, a.num_visible[end++]);
        }
        for (int64_t block = 0; block < ceil_div(visible, a.entries); ++block) {
            tasks.push_back({row, end - row, block});
        }
        for (; row < end; ++row) {
            std::fill(a.out + row * a.max_visible + a.num_visible[row], a.out + (row + 1) * a.max_visible,
                      -std::numeric_limits<float>::infinity());
        }
    }

    context.reserve_scratch<float>(kIndexWidth * kPanelKeys + kPanelKeys);
    const auto score_task = [&, q = q, weights = weights, heads = heads](int index, int thread) {
        const Task& task = tasks[static_cast<size_t>(index)];
        float* panel = context.scratch<float>(thread);
        float* scores = panel + kIndexWidth * kPanelKeys;
        const int64_t block = a.block_tables[a.row_seq[task.row] * a.table_stride + task.block];
        for (int64_t first = 0; first < a.entries; first += kPanelKeys) {
            const int64_t entry = task.block * a.entries + first;
            const int64_t in_block = std::min<int64_t>(kPanelKeys, a.entries - first);
            bool is_decoded = false;
            for (int64_t row = task.row; row < task.row + task.num_rows; ++row) {
                const int64_t count = std::min<int64_t>(in_block, a.num_visible[row] - entry);
                if (count <= 0) continue;
                if (!is_decoded) fill_panel(kernels, a, block, first, in_block, panel);
                is_decoded = true;
                kernels.score_panel(panel, q + row * heads * kIndexWidth, weights + row * heads,
                                    static_cast<int>(heads), scores);
                std::copy(scores, scores + count, a.out + row * a.max_visible + entry);
            }
        }
    };
    context.pool().run(static_cast<int>(tasks.size()), score_task);
}

void candidate_scores(Context& context, const IndexScoresArgs& a, const int32_t* candidates, int64_t num_candidates,
                      int64_t block_size) {
    check(a);
    if (a.rows == 0 || num_candidates == 0) return;
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();
    const auto [q, weights, heads] = prepare(context, kernels, a);
    const int64_t width = num_candidates * block_size;
    std::fill(a.out, a.out + a.rows * width, -std::numeric_limits<float>::infinity());
    context.reserve_scratch<float>(kIndexWidth * kPanelKeys + kPanelKeys);
    const int64_t parts = ceil_div(width, kPartColumns);
    const auto score_part = [&, q = q, weights = weights, heads = heads](int index, int thread) {
        const int64_t row = index / parts, first = index % parts * kPartColumns;
        const int64_t end = std::min(width, first + kPartColumns);
        float* panel = context.scratch<float>(thread);
        float* scores = panel + kIndexWidth * kPanelKeys;
        const int32_t* table = a.block_tables + a.row_seq[row] * a.table_stride;
        std::array<int64_t, kPanelKeys> numbers{}, columns{};
        int count = 0;
        const auto score = [&] {
            gather_panel(kernels, a, table, numbers, count, panel);
            kernels.score_panel(panel, q + row * heads * kIndexWidth, weights + row * heads,
                                static_cast<int>(heads), scores);
            float* out = a.out + row * width;
            for (size_t lane = 0; lane < static_cast<size_t>(count); ++lane) out[columns[lane]] = scores[lane];
            count = 0;
        };
        for (int64_t column = first; column < end; ++column) {
            const int64_t block = candidates[row * num_candidates + column / block_size];
            const int64_t number = block * block_size + column % block_size;
            if (block < 0 || number >= a.num_visible[row]) continue;
            numbers[static_cast<size_t>(count)] = number;
            columns[static_cast<size_t>(count)] = column;
            if (++count == kPanelKeys) score();
        }
        if (count > 0) score();
    };
    context.pool().run(static_cast<int>(a.rows * parts), score_part);
}

}  // namespace deepinfer::cpu
