// Sixteen float32 lanes as two AVX2 registers (x86-64-v3). Part of an `isa_*.cpp`, inside its namespace.

struct V {
    __m256 lo, hi;  // lanes 0-7, 8-15
};

constexpr int kGemmRows = 2;       // rows x weights of one register block of a product
constexpr int kGemmColumns = 2;
constexpr int kLogitHeads = 2;     // heads x keys of one register block of the logits
constexpr int kLogitKeys = 2;
constexpr int kValueHeads = 2;     // heads x vectors of one register block of the weighted sum of values
constexpr int kValueVectors = 2;
constexpr int kIndexHeads = 4;     // heads of one register block of the index scores

DI_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DI_INLINE V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
DI_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
DI_INLINE void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
/// All bits set in lanes `offset + i < n`.
DI_INLINE __m256i first_lanes(int n, int offset) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - offset), lane);
}
DI_INLINE V load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, first_lanes(n, 0)), _mm256_maskload_ps(p + 8, first_lanes(n, 8))};
}
DI_INLINE void store_first(float* p, V a, int n) {
    _mm256_maskstore_ps(p, first_lanes(n, 0), a.lo);
    _mm256_maskstore_ps(p + 8, first_lanes(n, 8), a.hi);
}

DI_INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
DI_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
DI_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
DI_INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
DI_INLINE V sqrt(V a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
DI_INLINE V fma(V a, V b, V c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
DI_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
DI_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
DI_INLINE V round_even(V a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
DI_INLINE V and_bits(V a, uint32_t mask) {
    const __m256 bits = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(mask)));
    return {_mm256_and_ps(a.lo, bits), _mm256_and_ps(a.hi, bits)};
}
DI_INLINE V or_bits(V a, V b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }

DI_INLINE __m256 power_of_two_half(__m256 n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
/// 2^n for integral n in [-126, 127].
DI_INLINE V power_of_two(V n) { return {power_of_two_half(n.lo), power_of_two_half(n.hi)}; }

/// Lanes 0-7 plus lanes 8-15, the first step of every sum over lanes.
DI_INLINE __m256 fold(V a) { return _mm256_add_ps(a.lo, a.hi); }

/// Largest lane, by bit pattern of the magnitudes: NaN is the largest.
DI_INLINE uint32_t max_magnitude_bits(V a) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    const __m256i half = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                                          _mm256_and_si256(_mm256_castps_si256(a.hi), mask));
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
}

DI_INLINE V load_weights(const float* p) { return load(p); }
DI_INLINE V load_weights_first(const float* p, int n) { return load_first(p, n); }

DI_INLINE __m256 widen(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
DI_INLINE V load_weights(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
DI_INLINE V load_weights_first(const uint16_t* p, int n) {
    uint16_t padded[16] = {};
    for (int i = 0; i < n; ++i) padded[i] = p[i];
    return load_weights(padded);
}

DI_INLINE __m256 round_bf16_half(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 clean = _mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                          _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                                          _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_and_ps(clean, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
/// Nearest bfloat16, ties to even, in the upper half of each lane; NaN stays NaN.
DI_INLINE V round_bf16(V a) { return {round_bf16_half(a.lo), round_bf16_half(a.hi)}; }

/// The upper halves of lanes that are already bfloat16 values.
DI_INLINE void store_bf16_first(uint16_t* p, V a, int n) {
    uint32_t bits[16];
    __builtin_memcpy(bits, &a, sizeof bits);
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(bits[i] >> 16);
}

/// Whether one of 64 E4M3 codes is NaN.
DI_INLINE bool has_e4m3_nan(const uint8_t* p) {
    const __m256i mask = _mm256_set1_epi8(0x7f);
    const __m256i lo = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask);
    const __m256i hi = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)), mask);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(lo, hi), mask)) != 0;
}

/// 2^-8 times the values of sixteen E4M3 codes that are numbers: a code has the bits of half precision, shifted
/// by 7, whose exponents are larger by 8.
DI_INLINE V decode_e4m3_numbers(const uint8_t* p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}

/// E2M1 values of the low nibbles of eight lanes.
DI_INLINE __m256 e2m1_value(__m256i codes) {
    const __m256 magnitude = _mm256_permutevar8x32_ps(
        _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f), codes);  // uses the low three bits
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}

/// Sixteen E2M1 codes of eight bytes, the even channel in the low nibble.
DI_INLINE V decode_e2m1(const uint8_t* p) {
    int32_t words[2];
    __builtin_memcpy(words, p, sizeof words);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return {e2m1_value(_mm256_srlv_epi32(_mm256_set1_epi32(words[0]), shifts)),
            e2m1_value(_mm256_srlv_epi32(_mm256_set1_epi32(words[1]), shifts))};
}

/// Eight channels of sixteen keys whose codes lie `stride` bytes apart: out[i] holds channel i of every key.
DI_INLINE void decode_e2m1_transposed(const uint8_t* p, int stride, V out[8]) {
    int32_t words[16];
    for (int i = 0; i < 16; ++i) __builtin_memcpy(&words[i], p + static_cast<int64_t>(i) * stride, 4);
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 8));
    for (int i = 0; i < 8; ++i) {
        out[i] = {e2m1_value(_mm256_srli_epi32(lo, 4 * i)), e2m1_value(_mm256_srli_epi32(hi, 4 * i))};
    }
}
