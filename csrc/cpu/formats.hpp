/// Scalar meanings of the release's number formats; the vector code decodes the same values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace deepinfer::cpu::formats {

inline constexpr std::array<float, 16> kE2M1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/// 2^exponent, exact down to the smallest subnormal.
constexpr float exp2_int(int exponent) {
    float x = 1.0f;
    for (; exponent > 0; --exponent) x *= 2.0f;
    for (; exponent < 0; ++exponent) x *= 0.5f;
    return x;
}

constexpr std::array<float, 256> make_e4m3() {
    std::array<float, 256> values{};
    for (int code = 0; code < 256; ++code) {
        const int exponent = (code >> 3) & 15, mantissa = code & 7;
        float x = exponent == 0 ? static_cast<float>(mantissa) * exp2_int(-9)
                                : static_cast<float>(8 + mantissa) * exp2_int(exponent - 10);
        if ((code & 127) == 127) x = __builtin_nanf("");
        values[static_cast<std::size_t>(code)] = code & 128 ? -x : x;
    }
    return values;
}

constexpr std::array<float, 256> make_e8m0() {
    std::array<float, 256> values{};
    for (int code = 0; code < 255; ++code) values[static_cast<std::size_t>(code)] = exp2_int(code - 127);
    values[255] = __builtin_nanf("");
    return values;
}

inline constexpr std::array<float, 256> kE4M3 = make_e4m3();  // 1 sign, 4 exponent (bias 7), 3 mantissa bits
inline constexpr std::array<float, 256> kE8M0 = make_e8m0();  // 2^(code - 127), 255 is NaN

inline float e4m3(uint8_t code) { return kE4M3[code]; }
inline float e8m0(uint8_t code) { return kE8M0[code]; }

}  // namespace deepinfer::cpu::formats
