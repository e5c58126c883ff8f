// Sixteen float32 lanes on AVX-512 (x86-64-v4). Part of an `isa_*.cpp`, inside its namespace.

using V = __m512;

constexpr int kGemmRows = 3;       // rows x weights of one register block of a product
constexpr int kGemmColumns = 8;
constexpr int kLogitHeads = 4;     // heads x keys of one register block of the logits
constexpr int kLogitKeys = 4;
constexpr int kValueHeads = 4;     // heads x vectors of one register block of the weighted sum of values
constexpr int kValueVectors = 4;
constexpr int kIndexHeads = 8;     // heads of one register block of the index scores

DI_INLINE V zero() { return _mm512_setzero_ps(); }
DI_INLINE V set1(float x) { return _mm512_set1_ps(x); }
DI_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
DI_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a); }
DI_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
DI_INLINE V load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
DI_INLINE void store_first(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }

DI_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
DI_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
DI_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
DI_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
DI_INLINE V sqrt(V a) { return _mm512_sqrt_ps(a); }
DI_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
DI_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either is NaN
DI_INLINE V min(V a, V b) { return _mm512_min_ps(a, b); }
DI_INLINE V round_even(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
DI_INLINE V and_bits(V a, uint32_t mask) { return _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32(mask))); }
DI_INLINE V or_bits(V a, V b) { return _mm512_or_ps(a, b); }

/// 2^n for integral n in [-126, 127].
DI_INLINE V power_of_two(V n) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

/// Lanes 0-7 plus lanes 8-15, the first step of every sum over lanes.
DI_INLINE __m256 fold(V a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }

/// Largest lane, by bit pattern of the magnitudes: NaN is the largest.
DI_INLINE uint32_t max_magnitude_bits(V a) {
    return _mm512_reduce_max_epu32(_mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}

DI_INLINE V load_weights(const float* p) { return load(p); }
DI_INLINE V load_weights_first(const float* p, int n) { return load_first(p, n); }

DI_INLINE V widen(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}
DI_INLINE V load_weights(const uint16_t* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
DI_INLINE V load_weights_first(const uint16_t* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

/// Nearest bfloat16, ties to even, in the upper half of each lane; NaN stays NaN.
DI_INLINE V round_bf16(V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(_mm512_and_epi32(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

/// The upper halves of lanes that are already bfloat16 values.
DI_INLINE void store_bf16_first(uint16_t* p, V a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n),
                             _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16)));
}

/// Whether one of 64 E4M3 codes is NaN.
DI_INLINE bool has_e4m3_nan(const uint8_t* p) {
    const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7f));
    return _mm512_cmpeq_epi8_mask(magnitudes, _mm512_set1_epi8(0x7f)) != 0;
}

/// 2^-8 times the values of sixteen E4M3 codes that are numbers: a code has the bits of half precision, shifted
/// by 7, whose exponents are larger by 8.
DI_INLINE V decode_e4m3_numbers(const uint8_t* p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xbf80))));
}

DI_INLINE __m512 e2m1_values() {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                          -3.0f, -4.0f, -6.0f);
}

/// Sixteen E2M1 codes of eight bytes, the even channel in the low nibble.
DI_INLINE V decode_e2m1(const uint8_t* p) {
    int64_t packed;
    __builtin_memcpy(&packed, p, sizeof packed);
    // Byte i goes to lanes 2i and 2i + 1; a lane's low four bits select the value.
    const __m512i spread = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set_epi64x(0, packed));
    const __m512i shifts = _mm512_set_epi32(4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0);
    const __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(spread, bytes), shifts);
    return _mm512_permutexvar_ps(codes, e2m1_values());
}

/// Eight channels of sixteen keys whose codes lie `stride` bytes apart: out[i] holds channel i of every key.
DI_INLINE void decode_e2m1_transposed(const uint8_t* p, int stride, V out[8]) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i offsets = _mm512_mullo_epi32(lane, _mm512_set1_epi32(stride));
    const __m512i words = _mm512_i32gather_epi32(offsets, p, 1);
    for (int i = 0; i < 8; ++i) {
        out[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), e2m1_values());
    }
}
