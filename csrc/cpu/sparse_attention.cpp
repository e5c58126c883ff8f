#include "cpu/sparse_attention.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu/linear.hpp"

namespace deepinfer::cpu {
namespace {

/// Appends the addresses of a row's records; -1 when an index lies past the pool.
int64_t list_records(const RecordPool& pool, int64_t row, const uint8_t** out) {
    int64_t count = 0;
    const int32_t* index = pool.index + row * pool.index_stride;
    for (int64_t i = 0; i < pool.width; ++i) {
        if (index[i] < 0) continue;
        const int64_t page = index[i] / pool.per_page;
        if (page >= pool.pages) return -1;
        out[count++] = pool.base + page * pool.page_stride + (index[i] - page * pool.per_page) * pool.record_stride;
    }
    return count;
}

/// Where one thread decodes and weighs a segment; the keys come first, aligned to cache lines.
struct Workspace {
    float* keys;      // [kSegmentKeys, 512]
    float* weights;   // [heads, kSegmentKeys]
    const float** q;  // [heads]

    static int64_t bytes(int64_t heads) {
        return kSegmentKeys * (kKeyWidth + heads) * 4 + ceil_div(heads * 8, 64) * 64;
    }
    Workspace(char* memory, int64_t heads)
        : keys(reinterpret_cast<float*>(memory)),
          weights(keys + kSegmentKeys * kKeyWidth),
          q(reinterpret_cast<const float**>(weights + heads * kSegmentKeys)) {}
};

/// Results of a row's segments: maxima and sums [segments, heads], values [segments, heads, 512].
struct Partial {
    float* maxima;
    float* sums;
    float* values;

    static int64_t floats(int64_t segments, int64_t heads) { return segments * heads * (kKeyWidth + 2); }
    Partial(float* memory, int64_t segments, int64_t heads)
        : maxima(memory), sums(memory + segments * heads), values(memory + 2 * segments * heads) {}
};

}  // namespace

void sparse_attention(Context& context, const AttentionArgs& a) {
    if (a.rows == 0 || a.heads == 0) return;
    const std::lock_guard lock(context.mutex);
    const Kernels& kernels = context.kernels();
    const int64_t heads = a.heads, max_keys = a.window.width + a.main.width;
    int64_t q_stride = kKeyWidth;
    const float* q = prepare_rows(context, a.q, a.q_dtype, false, a.rows * heads, kKeyWidth, q_stride);

    // Rows of addresses: [rows, max_keys], with the number of window keys and of all keys.
    const uint8_t** records = context.middle.reserve<const uint8_t*>(a.rows * max_keys);
    std::vector<int64_t> num_window(static_cast<size_t>(a.rows)), num_keys(static_cast<size_t>(a.rows));
    std::atomic<bool> is_outside{false};
    const int64_t list_chunk = 64;
    context.pool().run(static_cast<int>(ceil_div(a.rows, list_chunk)), [&](int task, int) {
        for (int64_t row = task * list_chunk; row < std::min(a.rows, (task + 1) * list_chunk); ++row) {
            const uint8_t** list = records + row * max_keys;
            const int64_t from_window = list_records(a.window, row, list);
            const int64_t from_main = from_window < 0 || a.main.width == 0
                                          ? 0
                                          : list_records(a.main, row, list + from_window);
            if (from_window < 0 || from_main < 0) is_outside.store(true, std::memory_order_relaxed);
            num_window[static_cast<size_t>(row)] = from_window;
            num_keys[static_cast<size_t>(row)] = from_window + from_main;
        }
    });
    if (is_outside.load(std::memory_order_relaxed)) throw std::out_of_range("a key index lies past its pool");

    const auto attend = [&](int64_t row, int64_t segment, const Partial& to, const Workspace& space) {
        const int64_t first = segment * kSegmentKeys;
        const int64_t count = std::min<int64_t>(kSegmentKeys, num_keys[static_cast<size_t>(row)] - first);
        const int64_t windows = std::clamp<int64_t>(num_window[static_cast<size_t>(row)] - first, 0, count);
        for (int64_t h = 0; h < heads; ++h) space.q[h] = q + (row * heads + h) * kKeyWidth;
        kernels.attend({space.q, static_cast<int>(heads), records + row * max_keys + first,
                        static_cast<int>(count), static_cast<int>(windows), a.window.kind, a.main.kind, a.scale,
                        space.keys, space.weights, to.maxima + segment * heads, to.sums + segment * heads,
                        to.values + segment * heads * kKeyWidth});
    };
    const auto merge = [&](int64_t row, int64_t segments, const Partial& from, float* memory) {
        const int64_t element = a.q_dtype == DType::kFloat32 ? 4 : 2;
        char* out = static_cast<char*>(a.out) + row * heads * kKeyWidth * element;
        if (segments == 0) {
            std::memset(out, 0, static_cast<size_t>(heads * kKeyWidth * element));
            return;
        }
        for (int64_t h = 0; h < heads; ++h) {
            kernels.merge(from.maxima + h, from.sums + h, from.values + h * kKeyWidth, heads,
                          static_cast<int>(segments), a.sink[h], memory);
            kernels.store_row(memory, kKeyWidth, a.q_dtype, out + h * kKeyWidth * element);
        }
    };
    const auto segments_of = [&](int64_t row) {
        return ceil_div(num_keys[static_cast<size_t>(row)], kSegmentKeys);
    };

    const int64_t max_segments = std::max<int64_t>(1, ceil_div(max_keys, kSegmentKeys));
    const int64_t partial_floats = Partial::floats(max_segments, heads);
    const int64_t space_bytes = Workspace::bytes(heads);
    if (a.rows >= 4 * context.num_threads()) {
        context.reserve_scratch<char>(space_bytes + partial_floats * 4);
        context.pool().run(static_cast<int>(a.rows), [&](int row, int thread) {
            char* memory = context.scratch<char>(thread);
            const Workspace space(memory, heads);
            const Partial partial(reinterpret_cast<float*>(memory + space_bytes), max_segments, heads);
            for (int64_t s = 0; s < segments_of(row); ++s) attend(row, s, partial, space);
            merge(row, segments_of(row), partial, space.keys);
        });
        return;
    }
    // Few rows: their segments are the tasks.
    float* memory = context.results.reserve<float>(a.rows * partial_floats);
    context.reserve_scratch<char>(space_bytes);
    std::vector<std::pair<int64_t, int64_t>> tasks;
    for (int64_t row = 0; row < a.rows; ++row) {
        for (int64_t s = 0; s < segments_of(row); ++s) tasks.emplace_back(row, s);
    }
    context.pool().run(static_cast<int>(tasks.size()), [&](int task, int thread) {
        const auto [row, segment] = tasks[static_cast<size_t>(task)];
        attend(row, segment, Partial(memory + row * partial_floats, max_segments, heads),
               Workspace(context.scratch<char>(thread), heads));
    });
    for (int64_t row = 0; row < a.rows; ++row) {
        merge(row, segments_of(row), Partial(memory + row * partial_floats, max_segments, heads),
              Workspace(context.scratch<char>(0), heads).keys);
    }
}

}  // namespace deepinfer::cpu
