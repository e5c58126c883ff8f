// Sixteen float32 lanes in plain C++ with GCC's 16-byte vectors: any machine, and fast where the compiler maps
// them to SSE or NEON. Part of an `isa_*.cpp`, inside its namespace.

typedef float F4 __attribute__((vector_size(16)));

struct V {
    F4 part[4];
};

constexpr int kGemmRows = 1;       // rows x weights of one register block of a product
constexpr int kGemmColumns = 4;
constexpr int kLogitHeads = 1;     // heads x keys of one register block of the logits
constexpr int kLogitKeys = 4;
constexpr int kValueHeads = 1;     // heads x vectors of one register block of the weighted sum of values
constexpr int kValueVectors = 4;
constexpr int kIndexHeads = 2;     // heads of one register block of the index scores

DI_INLINE V load(const float* p) {
    V a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
}
DI_INLINE void store(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
DI_INLINE V set1(float x) {
    const F4 all = {x, x, x, x};
    return {{all, all, all, all}};
}
DI_INLINE V zero() { return set1(0.0f); }
DI_INLINE V load_first(const float* p, int n) {
    float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
DI_INLINE void store_first(float* p, V a, int n) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

template <class F>
DI_INLINE V each_lane(V a, F f) {
    float lanes[16];
    store(lanes, a);
    for (float& lane : lanes) lane = f(lane);
    return load(lanes);
}

DI_INLINE V add(V a, V b) {
    return {{a.part[0] + b.part[0], a.part[1] + b.part[1], a.part[2] + b.part[2], a.part[3] + b.part[3]}};
}
DI_INLINE V sub(V a, V b) {
    return {{a.part[0] - b.part[0], a.part[1] - b.part[1], a.part[2] - b.part[2], a.part[3] - b.part[3]}};
}
DI_INLINE V mul(V a, V b) {
    return {{a.part[0] * b.part[0], a.part[1] * b.part[1], a.part[2] * b.part[2], a.part[3] * b.part[3]}};
}
DI_INLINE V div(V a, V b) {
    return {{a.part[0] / b.part[0], a.part[1] / b.part[1], a.part[2] / b.part[2], a.part[3] / b.part[3]}};
}
DI_INLINE V fma(V a, V b, V c) {
#ifdef __FP_FAST_FMAF
    V r;
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) r.part[i][j] = __builtin_fmaf(a.part[i][j], b.part[i][j], c.part[i][j]);
    }
    return r;
#else
    return add(mul(a, b), c);
#endif
}
DI_INLINE V max(V a, V b) {  // b where either is NaN
    V r;
    for (int i = 0; i < 4; ++i) r.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return r;
}
DI_INLINE V min(V a, V b) {
    V r;
    for (int i = 0; i < 4; ++i) r.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
    return r;
}

DI_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
DI_INLINE float from_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

DI_INLINE V round_even(V a) {
    // 1.5 * 2^23 leaves no fraction bits; the arguments of exp are far below it.
    return sub(add(a, set1(12582912.0f)), set1(12582912.0f));
}
DI_INLINE V and_bits(V a, uint32_t mask) {
    return each_lane(a, [mask](float x) { return from_bits(bits_of(x) & mask); });
}
DI_INLINE V or_bits(V a, V b) {
    float x[16], y[16];
    store(x, a);
    store(y, b);
    for (int i = 0; i < 16; ++i) x[i] = from_bits(bits_of(x[i]) | bits_of(y[i]));
    return load(x);
}
DI_INLINE V sqrt(V a) {
    return each_lane(a, [](float x) { return __builtin_sqrtf(x); });
}
/// 2^n for integral n in [-126, 127]; any value for NaN.
DI_INLINE V power_of_two(V n) {
    return each_lane(n, [](float x) {
        const int32_t exponent = x == x ? static_cast<int32_t>(x) : 0;
        return from_bits(static_cast<uint32_t>(exponent + 127) << 23);
    });
}

/// Sum over the lanes: l + (l + 8), then + 4, + 2, + 1, as everywhere.
DI_INLINE float sum_lanes(V a) {
    const F4 four = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
DI_INLINE void sum_lanes4(V a, V b, V c, V d, float* out) {
    out[0] = sum_lanes(a);
    out[1] = sum_lanes(b);
    out[2] = sum_lanes(c);
    out[3] = sum_lanes(d);
}
/// Largest lane, by bit pattern of the magnitudes: NaN is the largest.
DI_INLINE uint32_t max_magnitude_bits(V a) {
    float lanes[16];
    store(lanes, a);
    uint32_t largest = 0;
    for (float lane : lanes) {
        const uint32_t bits = bits_of(lane) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

DI_INLINE V load_weights(const float* p) { return load(p); }
DI_INLINE V load_weights_first(const float* p, int n) { return load_first(p, n); }
DI_INLINE V load_weights_first(const uint16_t* p, int n) {
    float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i] = from_bits(static_cast<uint32_t>(p[i]) << 16);
    return load(lanes);
}
DI_INLINE V load_weights(const uint16_t* p) { return load_weights_first(p, 16); }

/// Nearest bfloat16, ties to even, in the upper half of each lane; NaN stays NaN.
DI_INLINE V round_bf16(V a) {
    return each_lane(a, [](float x) {
        const uint32_t bits = bits_of(x);
        return from_bits(x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u : 0x7fc00000u);
    });
}
/// The upper halves of lanes that are already bfloat16 values.
DI_INLINE void store_bf16_first(uint16_t* p, V a, int n) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(bits_of(lanes[i]) >> 16);
}

/// Whether one of 64 E4M3 codes is NaN.
DI_INLINE bool has_e4m3_nan(const uint8_t* p) {
    bool found = false;
    for (int i = 0; i < 64; ++i) found |= (p[i] & 0x7f) == 0x7f;
    return found;
}

/// 2^-8 times the values of sixteen E4M3 codes that are numbers.
DI_INLINE V decode_e4m3_numbers(const uint8_t* p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = formats::e4m3(p[i]) * 0.00390625f;
    return load(lanes);
}
DI_INLINE V decode_e2m1(const uint8_t* p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = formats::kE2M1[(p[i / 2] >> (4 * (i % 2))) & 15];
    return load(lanes);
}
/// Eight channels of sixteen keys whose codes lie `stride` bytes apart: out[i] holds channel i of every key.
DI_INLINE void decode_e2m1_transposed(const uint8_t* p, int stride, V out[8]) {
    for (int i = 0; i < 8; ++i) {
        float lanes[16];
        for (int key = 0; key < 16; ++key) {
            lanes[key] = formats::kE2M1[(p[static_cast<int64_t>(key) * stride + i / 2] >> (4 * (i % 2))) & 15];
        }
        out[i] = load(lanes);
    }
}
