// Tile operators: copies, fills, reductions, scans, matrix products and atomics over regions of buffers.
//
// An element that no one has written may pass through them: what is computed from it counts as unwritten too,
// and only reading it in an expression stops the program. Rows of a tile that hold nothing are no fault as
// long as nobody looks at them.
#pragma once
#include "threads.hpp"

namespace emulator {

inline constexpr int MAX_RANK = 8;

struct RegionAxis {
    int64_t base, extent, size, stride;
    bool varies;  // false where the program says one element
};

struct Region {
    const Buffer& buffer;
    int rank;
    RegionAxis axes[MAX_RANK];

    // Element at `offset` from the base, an offset for every axis.
    int64_t position(const int64_t* offset) const {
        int64_t at = 0;
        bool is_inside = true;
        for (int k = 0; k < rank; ++k) {
            const int64_t index = axes[k].base + offset[k];
            is_inside &= index >= 0 && index < axes[k].size;
            at += index * axes[k].stride;
        }
        if (is_inside) return at;
        Axis all[MAX_RANK];
        for (int k = 0; k < rank; ++k) all[k] = {axes[k].base + offset[k], axes[k].size, axes[k].stride};
        return report_outside(buffer, all, rank);
    }
};

// Calls `visit` with every combination of 0..extent-1.
template <class Visit>
inline void for_each_offset(const int64_t* extents, int rank, Visit visit) {
    int64_t at[MAX_RANK] = {};
    for (int k = 0; k < rank; ++k) {
        if (extents[k] <= 0) return;
    }
    for (;;) {
        visit(at);
        int k = rank - 1;
        while (k >= 0 && ++at[k] == extents[k]) at[k--] = 0;
        if (k < 0) return;
    }
}

template <class Visit>
inline void for_each_element(const Region& region, Visit visit) {
    int64_t extents[MAX_RANK];
    for (int k = 0; k < region.rank; ++k) extents[k] = region.axes[k].extent;
    for_each_offset(extents, region.rank, visit);
}

// Pairs the varying axes of two regions in order; calls `visit` with the two positions.
template <class Visit>
inline void for_each_pair(const Region& a, const Region& b, Visit visit) {
    int of_a[MAX_RANK], of_b[MAX_RANK], rank = 0, rank_b = 0;
    int64_t extents[MAX_RANK];
    for (int k = 0; k < a.rank; ++k) {
        if (a.axes[k].varies) of_a[rank++] = k;
    }
    for (int k = 0; k < b.rank; ++k) {
        if (b.axes[k].varies) of_b[rank_b++] = k;
    }
    for (int k = 0; k < rank; ++k) extents[k] = std::min(a.axes[of_a[k]].extent, b.axes[of_b[k]].extent);
    for_each_offset(extents, rank, [&](const int64_t* at) {
        int64_t offset_a[MAX_RANK] = {}, offset_b[MAX_RANK] = {};
        for (int k = 0; k < rank; ++k) {
            offset_a[of_a[k]] = at[k];
            offset_b[of_b[k]] = at[k];
        }
        visit(a.position(offset_a), b.position(offset_b));
    });
}

template <class T>
inline bool is_known(const Buffer& buffer, int64_t at) {
    return at == OUTSIDE || is_written<T>(buffer, at);
}

template <class T>
inline void store_or_taint(const Buffer& buffer, int64_t at, T value, bool is_known) {
    if (at == OUTSIDE) return;
    if (!is_known && buffer.is_global()) fail("never written: a value goes to global %s", buffer.name);
    store<T>(buffer, at, value);
    set_written<T>(buffer, at, is_known);
}

template <class To, class From>
inline void copy(const Region& from, const Region& to) {
    for_each_pair(from, to, [&](int64_t source, int64_t target) {
        store_or_taint<To>(to.buffer, target, cast<To>(peek<From>(from.buffer, source)),
                           is_known<From>(from.buffer, source));
    });
}

template <class T>
inline void fill(const Region& region, T value) {
    for_each_element(region, [&](const int64_t* at) { store<T>(region.buffer, region.position(at), value); });
}

struct Sum {
    template <class T>
    static T combine(T a, T b) { return T(a + b); }
    template <class T>
    static T start() { return T(0); }
};
struct Max {
    template <class T>
    static T combine(T a, T b) { return maximum(a, b); }
    template <class T>
    static T start() {
        return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
    }
};
struct Min {
    template <class T>
    static T combine(T a, T b) { return minimum(a, b); }
    template <class T>
    static T start() {
        return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
    }
};
struct BitAnd {
    template <class T>
    static T combine(T a, T b) { return T(a & b); }
    template <class T>
    static T start() { return T(~T(0)); }
};
struct BitOr {
    template <class T>
    static T combine(T a, T b) { return T(a | b); }
    template <class T>
    static T start() { return T(0); }
};
struct BitXor {
    template <class T>
    static T combine(T a, T b) { return T(a ^ b); }
    template <class T>
    static T start() { return T(0); }
};

// Reduces axis `axis` of `from` into `to`, which lacks that axis or has it with one element.
template <class Operation, class To, class From>
inline void reduce(const Region& from, const Region& to, int axis, bool clear, bool of_magnitudes) {
    using W = Wide<To>;
    for_each_element(to, [&](const int64_t* at) {
        int64_t offset[MAX_RANK] = {};
        for (int k = 0, of_to = 0; k < from.rank; ++k) {
            if (k == axis) {
                of_to += to.rank == from.rank;
            } else if (of_to < to.rank) {
                offset[k] = at[of_to++];
            }
        }
        W total = of_magnitudes ? W(0) : Operation::template start<W>();
        bool known = true;
        for (offset[axis] = 0; offset[axis] < from.axes[axis].extent; ++offset[axis]) {
            const int64_t source = from.position(offset);
            W value = cast<W>(peek<From>(from.buffer, source));
            if constexpr (std::is_signed_v<W>) value = of_magnitudes && value < 0 ? W(-value) : value;
            total = Operation::combine(total, value);
            known &= is_known<From>(from.buffer, source);
        }
        const int64_t target = to.position(at);
        if (!clear) {
            known &= is_known<To>(to.buffer, target);
            total = Operation::combine(W(peek<To>(to.buffer, target)), total);
        }
        store_or_taint<To>(to.buffer, target, cast<To>(total), known);
    });
}

// Running totals along an axis.
template <class Operation, class T>
inline void scan(const Region& from, const Region& to, int axis, bool reverse) {
    using W = Wide<T>;
    Region lines = to;
    lines.axes[axis].extent = 1;
    const int64_t length = from.axes[axis].extent;
    for_each_element(lines, [&](const int64_t* at) {
        int64_t offset[MAX_RANK];
        std::copy(at, at + to.rank, offset);
        W total = Operation::template start<W>();
        bool known = true;
        for (int64_t k = 0; k < length; ++k) {
            offset[axis] = reverse ? length - 1 - k : k;
            const int64_t source = from.position(offset);
            known &= is_known<T>(from.buffer, source);
            total = Operation::combine(total, W(peek<T>(from.buffer, source)));
            store_or_taint<T>(to.buffer, to.position(offset), cast<T>(total), known);
        }
    });
}

template <class Operation, class T, class From>
inline void accumulate(const Region& from, const Region& to) {
    for_each_pair(from, to, [&](int64_t source, int64_t target) {
        const Wide<T> old = load<T>(to.buffer, target), value = cast<Wide<T>>(load<From>(from.buffer, source));
        store<T>(to.buffer, target, cast<T>(Operation::combine(old, value)));
    });
}

template <class Operation, class T>
inline T exchange(const Buffer& buffer, int64_t at, T value) {
    const T old = load<T>(buffer, at);
    store<T>(buffer, at, cast<T>(Operation::combine(Wide<T>(old), Wide<T>(value))));
    return old;
}

template <class T>
inline void transpose(const Region& from, const Region& to) {
    for_each_element(from, [&](const int64_t* at) {
        const int64_t swapped[] = {at[1], at[0]};
        const int64_t source = from.position(at);
        store_or_taint<T>(to.buffer, to.position(swapped), peek<T>(from.buffer, source), is_known<T>(from.buffer, source));
    });
}

// A matrix operand as rows of `columns` wide values, and which rows hold something unwritten.
template <class W>
struct Operand {
    std::vector<W> values;
    std::vector<uint8_t> known;
};

// A GPU's tensor cores count subnormal operands in bfloat16 as 0.
template <class T, class W>
inline W multiplied(W value, bool flushes) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        if (flushes && std::fabs(value) < 0x1p-126f) return std::copysign(W(0), value);
    }
    return value;
}

template <class W, class T>
inline Operand<W> gather(const Region& region, int64_t rows, int64_t columns, bool transposed, bool flushes) {
    Operand<W> result{std::vector<W>(rows * columns), std::vector<uint8_t>(rows, 1)};
    int64_t offset[MAX_RANK] = {};
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
            offset[region.rank - 2] = transposed ? column : row;
            offset[region.rank - 1] = transposed ? row : column;
            const int64_t at = region.position(offset);
            result.values[row * columns + column] = multiplied<T>(cast<W>(peek<T>(region.buffer, at)), flushes);
            result.known[row] &= is_known<T>(region.buffer, at);
        }
    }
    return result;
}

// c = a b (+ c): the sum over k runs in ascending order, each product and each sum rounded to c's wide type.
template <class C, class A, class B>
[[gnu::optimize("O3")]] inline void gemm(const Region& a, const Region& b, const Region& c, bool transpose_a, bool transpose_b, int64_t m,
                 int64_t n, int64_t k, bool clear, bool flushes) {
    using W = Wide<C>;
    const Operand<W> left = gather<W, A>(a, m, k, transpose_a, flushes);
    const Operand<W> right = gather<W, B>(b, n, k, !transpose_b, flushes);
    std::vector<W> by_k(k * n), sums(n);
    for (int64_t column = 0; column < n; ++column) {
        for (int64_t at = 0; at < k; ++at) by_k[at * n + column] = right.values[column * k + at];
    }
    int64_t offset[MAX_RANK] = {};
    for (int64_t row = 0; row < m; ++row) {
        std::vector<uint8_t> known(n, left.known[row]);
        offset[c.rank - 2] = row;
        for (int64_t column = 0; column < n; ++column) {
            offset[c.rank - 1] = column;
            const int64_t at = c.position(offset);
            sums[column] = clear ? W(0) : W(peek<C>(c.buffer, at));
            known[column] &= right.known[column] && (clear || is_known<C>(c.buffer, at));
        }
        for (int64_t at = 0; at < k; ++at) {
            const W factor = left.values[row * k + at];
            for (int64_t column = 0; column < n; ++column) sums[column] += factor * by_k[at * n + column];
        }
        for (int64_t column = 0; column < n; ++column) {
            offset[c.rank - 1] = column;
            store_or_taint<C>(c.buffer, c.position(offset), cast<C>(sums[column]), known[column]);
        }
    }
}

}  // namespace emulator
