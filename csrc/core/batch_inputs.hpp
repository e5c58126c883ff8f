/// Layouts of flat input buffers, and the builder of the forward's inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config.hpp"
#include "step_plan.hpp"

namespace deepinfer {

enum class DataType : uint8_t { kInt32, kInt64, kFloat32 };

/// One array of a flat buffer.
struct LayoutEntry {
    const char* name;
    DataType dtype;
    int64_t rows;
    int64_t columns;  ///< -1: one dimension
    int64_t offset;   ///< bytes, a multiple of 64
};

/// Where every array of a buffer stands.
struct Layout {
    std::vector<LayoutEntry> entries;
    int64_t num_bytes = 0;

    void add(const char* name, DataType dtype, int64_t rows, int64_t columns = -1);
};

/// Writes arrays into a buffer in the order of its layout.
class BufferWriter {
public:
    BufferWriter(const Layout& layout, std::span<std::byte> buffer);
    /// The next array; its name and type must be the ones of the layout.
    template <typename T>
    T* next(const char* name);

private:
    void* next_array(const char* name, DataType dtype);
    const Layout& layout_;
    std::byte* base_;
    size_t index_ = 0;
};

/// Vocabulary compression for n-gram windows: raw token id -> compressed id.
struct CompressedVocab {
    std::vector<int32_t> map;  // [vocab]; empty: the identity
    int32_t pad_id = 0;        ///< compressed id of missing history

    int32_t operator()(int32_t id) const { return map.empty() ? id : map[static_cast<size_t>(id)]; }
};

/// Arrays of the forward (see doc of `Batch` in deepinfer/runtime/batch.py).
Layout batch_layout(const CoreConfig& config, const StepPlan& plan);
void fill_batch(const CoreConfig& config, const CompressedVocab& vocab, const StepPlan& plan,
                std::span<std::byte> buffer);

}  // namespace deepinfer
