// Sums over the sixteen lanes on x86. The tree is part of the contract of every product:
// l + (l + 8), then + 4, + 2, + 1; it is the same whether one vector or four are summed.

/// out[i] = the sum over the lanes of the i-th vector.
DI_INLINE __m128 sum_lanes4(V a, V b, V c, V d) {
    const __m256 a8 = fold(a), b8 = fold(b), c8 = fold(c), d8 = fold(d);
    // [a0-3 | c0-3] + [a4-7 | c4-7]
    const __m256 ac = _mm256_add_ps(_mm256_permute2f128_ps(a8, c8, 0x20), _mm256_permute2f128_ps(a8, c8, 0x31));
    const __m256 bd = _mm256_add_ps(_mm256_permute2f128_ps(b8, d8, 0x20), _mm256_permute2f128_ps(b8, d8, 0x31));
    // [a0 a1 b0 b1 | c0 c1 d0 d1] + [a2 a3 b2 b3 | c2 c3 d2 d3]
    const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ac, bd, 0x44), _mm256_shuffle_ps(ac, bd, 0xee));
    const __m128 ab = _mm256_castps256_ps128(two), cd = _mm256_extractf128_ps(two, 1);
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

DI_INLINE void sum_lanes4(V a, V b, V c, V d, float* out) { _mm_storeu_ps(out, sum_lanes4(a, b, c, d)); }

DI_INLINE float sum_lanes(V a) {
    const __m256 a8 = fold(a);
    const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_add_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}
