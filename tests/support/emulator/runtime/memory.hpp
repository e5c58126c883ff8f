// Buffers and checked access to their elements.
//
// An index outside a buffer's shape stops the program, and so does reading an element of scratch memory that
// nothing has written. The caller may allow accesses outside global tensors: they then read 0 and write
// nothing, as the guards that TileLang adds do.
#pragma once
#include <cstdio>
#include <vector>

#include "formats.hpp"

namespace emulator {

struct Failure {};

struct Run {
    bool reverse = false;
    bool allow_outside = false;
    int64_t outside = 0;  // guarded accesses so far
    char message[512] = {};
};
inline Run run;

template <class... Arguments>
[[noreturn]] inline void fail(const char* format, Arguments... arguments) {
    std::snprintf(run.message, sizeof run.message, format, arguments...);
    throw Failure();
}

// A tensor argument, or scratch memory with a flag for every byte that has been written.
struct Buffer {
    uint8_t* data = nullptr;
    uint8_t* written = nullptr;  // null for global memory
    int64_t begin = 0, end = 0;  // bytes that may be touched, relative to data
    const char* name = "";

    bool is_global() const { return written == nullptr; }
};

struct Scratch : Buffer {
    std::vector<uint8_t> bytes, flags;
    Scratch(const char* label, int64_t size) : bytes(size, 0xff), flags(size, 0) {
        data = bytes.data();
        written = flags.data();
        end = size;
        name = label;
    }
};

// Access is not inlined: programs have thousands of them, and compiling takes longer than running.
struct Axis {
    int64_t index, size, stride;
};

inline constexpr int64_t OUTSIDE = std::numeric_limits<int64_t>::min();

inline int64_t report_outside(const Buffer& buffer, const Axis* axes, int count) {
    ++run.outside;
    if (buffer.is_global() && run.allow_outside) return OUTSIDE;
    char text[256];
    int used = 0;
    for (int k = 0; k < count && used < 200; ++k) {
        used += std::snprintf(text + used, sizeof text - used, "%s%lld of %lld", k ? ", " : "", (long long)axes[k].index,
                              (long long)axes[k].size);
    }
    fail("out of bounds: %s %s[%s]", buffer.is_global() ? "global" : "scratch", buffer.name, text);
}

// Position of an element in its buffer, in elements.
template <class... Axes>
[[gnu::noinline]] int64_t position(const Buffer& buffer, Axes... axes) {
    if (((axes.index < 0 || axes.index >= axes.size) || ...)) {
        const Axis all[] = {axes...};
        return report_outside(buffer, all, sizeof...(axes));
    }
    return ((axes.index * axes.stride) + ... + 0);
}

template <class T>
inline constexpr int64_t bits_of = std::is_same_v<T, e2m1> ? 4 : 8 * sizeof(T);

// First byte of an element; stops the program where the storage does not hold all of it.
template <class T>
inline uint8_t* locate(const Buffer& buffer, int64_t at) {
    const int64_t first = at * bits_of<T> >> 3;
    if (first < buffer.begin || first + int64_t(sizeof(T)) > buffer.end) {
        fail("out of bounds: element %lld of %s lies outside its storage", (long long)at, buffer.name);
    }
    return buffer.data + first;
}

template <class T>
inline bool is_written(const Buffer& buffer, int64_t at) {
    if (buffer.is_global()) return true;
    const uint8_t* flags = buffer.written + (at * bits_of<T> >> 3);
    for (size_t k = 0; k < sizeof(T); ++k) {
        if (!flags[k]) return false;
    }
    return true;
}

template <class T>
inline void set_written(const Buffer& buffer, int64_t at, bool value) {
    if (!buffer.is_global()) std::memset(buffer.written + (at * bits_of<T> >> 3), value, sizeof(T));
}

// Value of an element whether written or not.
template <class T>
inline T peek(const Buffer& buffer, int64_t at) {
    if (at == OUTSIDE) return cast<T>(0.0f);
    const uint8_t* from = locate<T>(buffer, at);
    T value;
    std::memcpy(&value, from, sizeof value);
    if constexpr (std::is_same_v<T, e2m1>) value.bits = at & 1 ? value.bits >> 4 : value.bits & 15;
    return value;
}

template <class T>
[[gnu::noinline]] T load(const Buffer& buffer, int64_t at) {
    const T value = peek<T>(buffer, at);
    if (at != OUTSIDE && !is_written<T>(buffer, at)) {
        fail("never written: element %lld of scratch %s is read", (long long)at, buffer.name);
    }
    return value;
}

template <class T>
[[gnu::noinline]] void store(const Buffer& buffer, int64_t at, T value) {
    if (at == OUTSIDE) return;
    uint8_t* to = locate<T>(buffer, at);
    if constexpr (std::is_same_v<T, e2m1>) {
        *to = at & 1 ? uint8_t((*to & 15) | value.bits << 4) : uint8_t((*to & 240) | (value.bits & 15));
    } else {
        std::memcpy(to, &value, sizeof value);
    }
    set_written<T>(buffer, at, true);
}

}  // namespace emulator
