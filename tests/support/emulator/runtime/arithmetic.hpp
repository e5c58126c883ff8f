// Operations whose meaning on a GPU is not that of a C++ operator.
#pragma once
#include <algorithm>

#include "memory.hpp"

namespace emulator {

// Keeps the compiler from fusing what the program rounds twice.
template <class T>
inline T rounded(T x) {
    asm volatile("" : "+m"(x));
    return x;
}

// 32-bit index arithmetic that overflows is a fault of the program; wider and unsigned types wrap.
[[noreturn]] inline void overflow(int32_t a, char operation, int32_t b) {
    fail("int32 overflow: %d %c %d", a, operation, b);
}

template <class T>
inline T add(T a, T b) {
    if constexpr (std::is_same_v<T, int32_t>) {
        int32_t result;
        if (__builtin_add_overflow(a, b, &result)) overflow(a, '+', b);
        return result;
    } else {
        return T(Wide<T>(a) + Wide<T>(b));
    }
}

template <class T>
inline T subtract(T a, T b) {
    if constexpr (std::is_same_v<T, int32_t>) {
        int32_t result;
        if (__builtin_sub_overflow(a, b, &result)) overflow(a, '-', b);
        return result;
    } else {
        return T(Wide<T>(a) - Wide<T>(b));
    }
}

template <class T>
inline T multiply(T a, T b) {
    if constexpr (std::is_same_v<T, int32_t>) {
        int32_t result;
        if (__builtin_mul_overflow(a, b, &result)) overflow(a, '*', b);
        return result;
    } else {
        return T(Wide<T>(a) * Wide<T>(b));
    }
}

// Two bfloat16 in a word, the first in the low half.
struct bfloat16x2 {
    bfloat16 low, high;
};

inline bfloat16x2 multiply_pairs(bfloat16x2 a, bfloat16x2 b) {
    return {multiply(a.low, b.low), multiply(a.high, b.high)};
}

template <class T>
inline void check_divisor(T b) {
    if constexpr (std::is_integral_v<T>) {
        if (b == 0) fail("division by zero");
    }
}

template <class T>
inline T divide(T a, T b) {  // towards zero for integers
    check_divisor(b);
    return T(Wide<T>(a) / Wide<T>(b));
}

template <class T>
inline T remainder(T a, T b) {
    check_divisor(b);
    if constexpr (std::is_integral_v<T>) {
        return T(a % b);
    } else {
        return T(std::fmod(Wide<T>(a), Wide<T>(b)));
    }
}

template <class T>
inline T floor_divide(T a, T b) {
    check_divisor(b);
    if constexpr (std::is_integral_v<T>) {
        const T quotient = T(a / b);
        return T(quotient - (a % b != 0 && (a < 0) != (b < 0)));
    } else {
        return T(std::floor(Wide<T>(a) / Wide<T>(b)));
    }
}

template <class T>
inline T floor_modulo(T a, T b) {
    check_divisor(b);
    if constexpr (std::is_integral_v<T>) {
        const T rest = T(a % b);
        return T(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
    } else {
        return T(Wide<T>(a) - std::floor(Wide<T>(a) / Wide<T>(b)) * Wide<T>(b));
    }
}

// Of a NaN and a number, the number: fmin and fmax.
template <class T>
inline T minimum(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        return std::min(a, b);
    } else {
        return T(std::fmin(Wide<T>(a), Wide<T>(b)));
    }
}

template <class T>
inline T maximum(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        return std::max(a, b);
    } else {
        return T(std::fmax(Wide<T>(a), Wide<T>(b)));
    }
}

template <class T>
inline T shift_left(T a, int64_t n) {
    if (n < 0 || n >= 8 * int64_t(sizeof(T))) fail("shift by %lld of a %d-bit value", (long long)n, int(8 * sizeof(T)));
    return T(std::make_unsigned_t<T>(a) << n);
}

template <class T>
inline T shift_right(T a, int64_t n) {
    if (n < 0 || n >= 8 * int64_t(sizeof(T))) fail("shift by %lld of a %d-bit value", (long long)n, int(8 * sizeof(T)));
    return T(a >> n);
}

// CUDA's own functions, as `external` and their name.
inline float external__fadd_rn(float a, float b) { return rounded(a + b); }
inline float external__fsub_rn(float a, float b) { return rounded(a - b); }
inline float external__fmul_rn(float a, float b) { return rounded(a * b); }
inline float external__fdiv_rn(float a, float b) { return a / b; }
inline float external__frcp_rn(float a) { return 1.0f / a; }
inline float external__fsqrt_rn(float a) { return std::sqrt(a); }
inline float external__fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float external__expf(float a) { return std::exp(a); }
inline float external__logf(float a) { return std::log(a); }
inline float external__fdividef(float a, float b) { return a / b; }
inline uint32_t external__umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline int32_t external__mulhi(int32_t a, int32_t b) { return int32_t(int64_t(a) * b >> 32); }
inline uint64_t external__umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)(a) * b >> 64); }
// Bytes 0 to 3 of the result: those of b:a that the digits of the selector name. A digit above 7 copies a sign: unknown.
inline uint32_t external__byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    if ((selector & 0x8888) != 0) fail("selector of __byte_perm");
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k) result |= uint32_t(both >> 8 * (selector >> 4 * k & 7) & 0xFF) << 8 * k;
    return result;
}
inline uint32_t external__bytes_of(uint32_t low, uint32_t high, uint32_t digits) {
    return external__byte_perm(low, high, digits & 0xFFFF);
}
inline uint32_t external__magnitude_digits(uint32_t word) { return word & 0x77777777; }
inline uint32_t external__relu_pair(uint32_t pair) {
    uint32_t result = 0;
    for (int k = 0; k < 2; ++k) {
        float16 x;
        x.bits = uint16_t(pair >> 16 * k);
        if (float(x) > 0) result |= uint32_t(x.bits) << 16 * k;  // neither numbers below 0 nor NaN
    }
    return result;
}
inline int32_t external__popc(uint32_t a) { return __builtin_popcount(a); }
inline int32_t external__popcll(uint64_t a) { return __builtin_popcountll(a); }
inline int32_t external__clz(int32_t a) { return a == 0 ? 32 : __builtin_clz(uint32_t(a)); }
inline int32_t external__clzll(int64_t a) { return a == 0 ? 64 : __builtin_clzll(uint64_t(a)); }
inline int32_t external__ffs(int32_t a) { return __builtin_ffs(a); }
inline int32_t external__ffsll(int64_t a) { return __builtin_ffsll(a); }
inline int32_t external__float_as_int(float a) { return bit_cast<int32_t>(a); }
inline uint32_t external__float_as_uint(float a) { return bit_cast<uint32_t>(a); }
inline float external__int_as_float(int32_t a) { return bit_cast<float>(a); }
inline float external__uint_as_float(uint32_t a) { return bit_cast<float>(a); }
inline int32_t external__float2int_rn(float a) { return cast<int32_t>(std::nearbyint(a)); }


}  // namespace emulator
