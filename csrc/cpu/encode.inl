// Encoders of the cache records. Plain loops over one scale group, which the compiler vectorises.

DI_INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
DI_INLINE float bits_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

/// Code of a magnitude that is an E4M3 value: the upper bits of its pattern, or a multiple of 2^-9.
DI_INLINE uint32_t e4m3_code(float magnitude) {
    const uint32_t normal = (float_bits(magnitude) >> 20) - 960u;  // (127 - 7) exponents of 8 codes lie below
    const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(magnitude * 512.0f));
    return magnitude < 0.015625f ? subnormal : normal;
}

/// Nearest E2M1 code of |x|, ties to even: steps of 1/2 below 2, 1 below 4, then 2.
DI_INLINE uint32_t e2m1_code(float x) {
    float a = x < 0 ? -x : x;
    a = a < 6.0f ? a : 6.0f;
    const float power = a < 2.0f ? 1.0f : a < 4.0f ? 2.0f : 4.0f;
    const float magic = power * 6291456.0f;  // 1.5 * 2^22 * power leaves multiples of power / 2
    const float rounded = (a + magic) - magic;
    const uint32_t large = (float_bits(rounded) >> 22) - 252u;  // 2, 3, 4, 6 are codes 4 ... 7
    const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(rounded * 2.0f));
    return (rounded < 2.0f ? small : large) | (float_bits(x) >> 31) << 3;
}

template <int N>
DI_INLINE uint32_t group_magnitude(const float* x) {
    uint32_t largest = 0;
    for (int i = 0; i < N; ++i) {
        const uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/// Byte of the smallest power of two not below the positive normal float32 `ratio`; 255 for infinity and NaN.
DI_INLINE uint32_t ceil_e8m0(float ratio) {
    const uint32_t bits = float_bits(ratio);
    return bits >= 0x7f800000u ? 255u : (bits + 0x7fffffu) >> 23;
}

/// 2^-(code - 127), subnormal for 254; NaN for 255.
DI_INLINE float inverse_e8m0(uint32_t code) {
    return code == 255u ? __builtin_nanf("") : code == 254u ? bits_float(0x400000u) : bits_float((254u - code) << 23);
}

/// amax of a group, at least `floor`; NaN when a member is NaN.
DI_INLINE float group_amax(uint32_t magnitude, float floor) {
    const float amax = bits_float(magnitude);
    return amax < floor ? floor : amax;
}

DI_INLINE void widen_row(const void* x, DType dtype, int n, float* out) {
    for (int c = 0; c < n; c += kLanes) store(out + c, load_any(x, dtype, c, kLanes));
}

void encode_fp8(const void* x, DType dtype, int n, uint8_t* codes, uint8_t* scales) {
    for (int g = 0; g < n / 32; ++g) {
        float group[32];
        widen_row(static_cast<const char*>(x) + static_cast<int64_t>(g) * 32 * (dtype == DType::kFloat32 ? 4 : 2),
                  dtype, 32, group);
        const uint32_t scale = ceil_e8m0(group_amax(group_magnitude<32>(group), 1e-4f) / 448.0f);
        scales[g] = static_cast<uint8_t>(scale);
        const V inverse = set1(inverse_e8m0(scale)), top = set1(448.0f), bottom = set1(-448.0f);
        for (int c = 0; c < 32; c += kLanes) {
            store(group + c, round_e4m3(min(top, max(bottom, mul(load(group + c), inverse)))));
        }
        for (int i = 0; i < 32; ++i) {
            const uint32_t bits = float_bits(group[i]), sign = bits >> 31 << 7;
            const float magnitude = bits_float(bits & 0x7fffffffu);
            codes[g * 32 + i] = static_cast<uint8_t>(scale == 255u ? 127u : e4m3_code(magnitude) | sign);
        }
    }
}

void encode_mxfp4(const void* x, DType dtype, int n, uint8_t* codes, uint8_t* scales) {
    for (int g = 0; g < n / 32; ++g) {
        float group[32];
        widen_row(static_cast<const char*>(x) + static_cast<int64_t>(g) * 32 * (dtype == DType::kFloat32 ? 4 : 2),
                  dtype, 32, group);
        // 6 * 2^-126 keeps the ratio normal.
        const uint32_t scale = ceil_e8m0(group_amax(group_magnitude<32>(group), 7.052966104933725e-38f) / 6.0f);
        scales[g] = static_cast<uint8_t>(scale);
        const float inverse = inverse_e8m0(scale);
        uint32_t nibbles[32];
        for (int i = 0; i < 32; ++i) nibbles[i] = e2m1_code(group[i] * inverse);
        for (int i = 0; i < 16; ++i) codes[g * 16 + i] = static_cast<uint8_t>(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    }
}

void encode_fp4(const void* x, DType dtype, int n, uint8_t* codes, uint8_t* scales) {
    for (int g = 0; g < n / 16; ++g) {
        float group[16];
        widen_row(static_cast<const char*>(x) + static_cast<int64_t>(g) * 16 * (dtype == DType::kFloat32 ? 4 : 2),
                  dtype, 16, group);
        const uint32_t magnitude = group_magnitude<16>(group);
        const bool is_nan = magnitude > 0x7f800000u;
        float ratio = group_amax(magnitude, 0.01171875f) / 6.0f;  // at least 6 * 2^-9, so the scale is not zero
        ratio = ratio < 448.0f ? ratio : 448.0f;
        const float scale = first_lane(round_e4m3(set1(ratio)));
        scales[g] = static_cast<uint8_t>(is_nan ? 127u : e4m3_code(scale));
        uint32_t nibbles[16];
        for (int i = 0; i < 16; ++i) nibbles[i] = is_nan ? 7u : e2m1_code(group[i] / scale);
        for (int i = 0; i < 8; ++i) codes[g * 8 + i] = static_cast<uint8_t>(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    }
}

void round_mxfp4_row(const void* x, DType dtype, int n, void* out) {
    uint8_t codes[16], scale;
    for (int g = 0; g < n / 32; ++g) {
        const int64_t at = static_cast<int64_t>(g) * 32 * (dtype == DType::kFloat32 ? 4 : 2);
        encode_mxfp4(static_cast<const char*>(x) + at, dtype, 32, codes, &scale);
        const V factor = set1(formats::e8m0(scale));
        store_any(out, dtype, g * 32, mul(decode_e2m1(codes), factor), kLanes);
        store_any(out, dtype, g * 32 + kLanes, mul(decode_e2m1(codes + 8), factor), kLanes);
    }
}
