// Number formats that C++ lacks, as storage types that convert to and from float.
//
// Narrowing rounds to nearest, ties to even, and saturates where the GPU's conversions do (E4M3, E5M2, E2M1);
// float16 and bfloat16 overflow to infinity. E8M0 rounds up, as the GPU's conversion to scales does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace emulator {

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Magnitudes with `EXPONENT` bits with `BIAS` and `MANTISSA` bits, subnormals included.
template <int EXPONENT, int MANTISSA, int BIAS>
struct Minifloat {
    // Magnitude bits of a finite |x|, rounded to nearest even on an unbounded exponent range.
    static uint32_t round(float magnitude) {
        if (magnitude == 0) return 0;
        const int exponent = std::max(std::ilogb(magnitude), 1 - BIAS);
        const float steps = std::nearbyint(std::ldexp(magnitude, MANTISSA - exponent));
        // A carry out of the mantissa runs into the exponent, and a subnormal has no implicit bit: both by adding.
        return (uint32_t(exponent + BIAS - 1) << MANTISSA) + uint32_t(steps);
    }
    static float value(uint32_t magnitude_bits) {
        const int exponent = int(magnitude_bits >> MANTISSA);
        const uint32_t mantissa = magnitude_bits & ((1u << MANTISSA) - 1);
        if (exponent == 0) return std::ldexp(float(mantissa), 1 - BIAS - MANTISSA);
        return std::ldexp(float(mantissa | (1u << MANTISSA)), exponent - BIAS - MANTISSA);
    }
};

// Above the magnitude LARGEST stand infinity, where there is one, and NaN; what is too large becomes OVERFLOW.
template <class Storage, int EXPONENT, int MANTISSA, int BIAS, uint32_t LARGEST, uint32_t OVERFLOW,
          uint32_t NOT_A_NUMBER, bool HAS_INFINITY>
struct SmallFloat {
    using Format = Minifloat<EXPONENT, MANTISSA, BIAS>;
    static constexpr int SIGN = EXPONENT + MANTISSA;
    Storage bits;

    SmallFloat() = default;
    explicit SmallFloat(float x) {
        const uint32_t sign = std::signbit(x) ? 1u << SIGN : 0;
        if (std::isnan(x)) {
            bits = Storage(NOT_A_NUMBER);
        } else {
            const uint32_t magnitude = std::isinf(x) ? OVERFLOW : Format::round(std::fabs(x));
            bits = Storage(sign | (magnitude > LARGEST ? OVERFLOW : magnitude));
        }
    }
    operator float() const {
        const uint32_t magnitude = bits & ((1u << SIGN) - 1);
        float x = Format::value(magnitude);
        if (magnitude > LARGEST) {
            x = HAS_INFINITY && magnitude == LARGEST + 1 ? std::numeric_limits<float>::infinity()
                                                      : std::numeric_limits<float>::quiet_NaN();
        }
        return bits >> SIGN & 1 ? -x : x;
    }
};

using float16 = SmallFloat<uint16_t, 5, 10, 15, 0x7bff, 0x7c00, 0x7fff, true>;
using e4m3 = SmallFloat<uint8_t, 4, 3, 7, 0x7e, 0x7e, 0x7f, false>;
using e5m2 = SmallFloat<uint8_t, 5, 2, 15, 0x7b, 0x7b, 0x7f, true>;
using e2m1 = SmallFloat<uint8_t, 2, 1, 1, 0x7, 0x7, 0x7, false>;  // in the low nibble; no NaN: it becomes the largest

struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    explicit bfloat16(float x) {
        const uint32_t wide = bit_cast<uint32_t>(x);
        bits = std::isnan(x) ? 0x7fff : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    operator float() const { return bit_cast<float>(uint32_t(bits) << 16); }
};

struct e8m0 {
    uint8_t bits;
    e8m0() = default;
    explicit e8m0(float x) {
        if (std::isnan(x)) {
            bits = 255;
        } else {
            const uint32_t wide = bit_cast<uint32_t>(std::fabs(x));
            const uint32_t up = (wide >> 23) + ((wide & 0x7fffff) != 0);
            // The smallest code stands for 2^-127, a float's subnormal with the upper mantissa bit.
            bits = uint8_t(wide <= 0x400000 ? 0 : up > 254 ? 254 : up);
        }
    }
    operator float() const {
        return bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, int(bits) - 127);
    }
};

template <class T>
inline constexpr bool is_narrow = !std::is_arithmetic_v<T>;

// What arithmetic on a type computes in.
template <class T>
using Wide = std::conditional_t<is_narrow<T>, float, T>;

template <class To, class From>
inline To cast(From x) {
    if constexpr (std::is_same_v<To, From>) {
        return x;
    } else if constexpr (std::is_same_v<To, bool>) {
        return Wide<From>(x) != 0;
    } else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>) {
        // Out of range saturates and NaN is 0 on a GPU; in C++ both are undefined.
        const auto wide = Wide<From>(x);
        if (std::isnan(wide)) return 0;
        if (wide >= std::ldexp(1.0, std::numeric_limits<To>::digits)) return std::numeric_limits<To>::max();
        if (wide <= Wide<From>(std::numeric_limits<To>::lowest())) return std::numeric_limits<To>::lowest();
        return To(wide);
    } else if constexpr (is_narrow<To>) {
        return To(float(x));
    } else {
        return To(Wide<From>(x));
    }
}

}  // namespace emulator
