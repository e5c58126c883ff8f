#include "cpu/sparse_attention.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu/linear.hpp"

namespace deepinfer::cpu {
namespace {

constexpr int64_t kSharedKeys = 320;  // decoded records kept for a block of rows: 640 KiB, within a core's cache
constexpr int64_t kBlockRows = 16;

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

/// Decoded records of one thread. Rows that stand together share most of their keys.
class DecodedKeys {
public:
    static int64_t bytes(int64_t capacity) { return capacity * (kKeyWidth * 4 + 4 * kEntryBytes); }

    /// `memory` holds bytes(capacity), aligned to cache lines.
    DecodedKeys(char* memory, int64_t capacity)
        : values_(reinterpret_cast<float*>(memory)),
          entries_(reinterpret_cast<Entry*>(memory + capacity * kKeyWidth * 4)),
          capacity_(capacity),
          mask_(std::bit_floor(static_cast<uint64_t>(4 * capacity)) - 1) {
        clear();
    }

    /// Makes room for `count` more records; what was decoded before is forgotten when there is none.
    void reserve(int64_t count) {
        if (used_ + count > capacity_) clear();
    }

    const float* get(const Kernels& kernels, const uint8_t* record, RecordKind kind) {
        uint64_t place = (reinterpret_cast<uintptr_t>(record) * 0x9e3779b97f4a7c15u >> 20) & mask_;
        while (entries_[place].record != nullptr) {
            if (entries_[place].record == record) return entries_[place].values;
            place = (place + 1) & mask_;
        }
        float* values = values_ + used_++ * kKeyWidth;
        kernels.decode_record(record, kind, values);
        entries_[place] = {record, values};
        return values;
    }

private:
    struct Entry {
        const uint8_t* record;
        const float* values;
    };
    static constexpr int64_t kEntryBytes = sizeof(Entry);

    void clear() {
        std::fill_n(entries_, mask_ + 1, Entry{nullptr, nullptr});
        used_ = 0;
    }

    float* values_;   // [capacity, 512]
    Entry* entries_;  // open addressing, at least half of the places free
    int64_t capacity_;
    uint64_t mask_;
    int64_t used_ = 0;
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

    std::vector<const float*> head_pointers(static_cast<size_t>(a.rows * heads));
    for (size_t i = 0; i < head_pointers.size(); ++i) head_pointers[i] = q + static_cast<int64_t>(i) * kKeyWidth;
    const float* const* q_heads = head_pointers.data();

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

    const auto attend = [&](int64_t row, int64_t segment, const Partial& to, DecodedKeys& decoded, float* weights) {
        const int64_t first = segment * kSegmentKeys;
        const int64_t count = std::min<int64_t>(kSegmentKeys, num_keys[static_cast<size_t>(row)] - first);
        const uint8_t** listed = records + row * max_keys + first;
        decoded.reserve(count);
        const float* keys[kSegmentKeys];
        for (int64_t key = 0; key < count; ++key) {
            const bool is_window = first + key < num_window[static_cast<size_t>(row)];
            keys[key] = decoded.get(kernels, listed[key], is_window ? a.window.kind : a.main.kind);
        }
        kernels.attend({q_heads + row * heads, static_cast<int>(heads), keys, static_cast<int>(count), a.scale,
                        weights, to.maxima + segment * heads, to.sums + segment * heads,
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
    const int64_t weight_floats = kSegmentKeys * heads;
    if (a.rows >= 4 * context.num_threads()) {
        // Blocks of rows that stand together, each with one set of decoded keys.
        const int64_t block_rows = std::clamp<int64_t>(a.rows / (4 * context.num_threads()), 1, kBlockRows);
        const int64_t decoded_bytes = DecodedKeys::bytes(kSharedKeys);
        context.reserve_scratch<char>(decoded_bytes + (partial_floats + weight_floats + kKeyWidth) * 4);
        context.pool().run(static_cast<int>(ceil_div(a.rows, block_rows)), [&](int block, int thread) {
            char* memory = context.scratch<char>(thread);
            DecodedKeys decoded(memory, kSharedKeys);
            float* out = reinterpret_cast<float*>(memory + decoded_bytes);
            float* weights = out + kKeyWidth;
            const Partial partial(weights + weight_floats, max_segments, heads);
            for (int64_t row = block * block_rows; row < std::min(a.rows, (block + 1) * block_rows); ++row) {
                for (int64_t s = 0; s < segments_of(row); ++s) attend(row, s, partial, decoded, weights);
                merge(row, segments_of(row), partial, out);
            }
        });
        return;
    }
    // Few rows: their segments are the tasks.
    float* memory = context.results.reserve<float>(a.rows * partial_floats);
    const int64_t decoded_bytes = DecodedKeys::bytes(kSegmentKeys);
    context.reserve_scratch<char>(decoded_bytes + (weight_floats + kKeyWidth) * 4);
    std::vector<std::pair<int64_t, int64_t>> tasks;
    for (int64_t row = 0; row < a.rows; ++row) {
        for (int64_t s = 0; s < segments_of(row); ++s) tasks.emplace_back(row, s);
    }
    context.pool().run(static_cast<int>(tasks.size()), [&](int task, int thread) {
        const auto [row, segment] = tasks[static_cast<size_t>(task)];
        char* space = context.scratch<char>(thread);
        DecodedKeys decoded(space, kSegmentKeys);
        attend(row, segment, Partial(memory + row * partial_floats, max_segments, heads), decoded,
               reinterpret_cast<float*>(space + decoded_bytes));
    });
    for (int64_t row = 0; row < a.rows; ++row) {
        merge(row, segments_of(row), Partial(memory + row * partial_floats, max_segments, heads),
              context.scratch<float>(0));
    }
}

}  // namespace deepinfer::cpu
