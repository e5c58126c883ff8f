// Functions over sixteen lanes. Every lane runs the same instructions, so a value's result does not depend on
// its place, unlike library routines whose scalar tails differ from their vector bodies.

/// e^x to about one unit in the last place; 0 far below, infinity far above, NaN for NaN.
DI_INLINE V exp(V x) {
    x = min(set1(90.0f), max(set1(-106.0f), x));
    const V n = round_even(mul(x, set1(1.44269504f)));
    V r = fma(n, set1(-0.693359375f), x);  // ln 2 in two pieces; the first has few bits, so n times it is exact
    r = fma(n, set1(2.12194440e-4f), r);
    V p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    // 2^n in two factors: n reaches 130 above and -153 below, where the result overflows and underflows.
    const V half = round_even(mul(n, set1(0.5f)));
    return mul(mul(p, power_of_two(half)), power_of_two(sub(n, half)));
}

DI_INLINE float first_lane(V a) {
    float lanes[kLanes];
    store(lanes, a);
    return lanes[0];
}

/// Nearest E4M3 value, ties to even, of lanes within [-448, 448]; NaN stays NaN.
DI_INLINE V round_e4m3(V x) {
    // Adding and subtracting 1.5 * 2^20 * 2^e leaves three mantissa bits of a value in [2^e, 2^(e+1)); below
    // 2^-6 the grid is that of 2^-6.
    const V power = max(and_bits(x, 0x7f800000u), set1(0.015625f));
    const V magic = mul(power, set1(1572864.0f));
    const V magnitude = and_bits(x, 0x7fffffffu);
    return or_bits(sub(add(magnitude, magic), magic), and_bits(x, 0x80000000u));
}

/// Rounds 32 channels to E4M3 codes times one power of two; a group with a value that is not finite becomes NaN.
DI_INLINE void round_group(V& a, V& b) {
    const uint32_t bits_a = max_magnitude_bits(a), bits_b = max_magnitude_bits(b);
    const uint32_t largest = bits_a > bits_b ? bits_a : bits_b;
    if (largest >= 0x7f800000u) {
        a = b = set1(__builtin_nanf(""));
        return;
    }
    float amax;
    __builtin_memcpy(&amax, &largest, sizeof amax);
    amax = amax > 1e-4f ? amax : 1e-4f;
    const float ratio = amax / 448.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &ratio, sizeof bits);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);  // of the power of two at or above
    const uint32_t scale_bits = exponent << 23, inverse_bits = (254u - exponent) << 23;
    float scale, inverse;
    __builtin_memcpy(&scale, &scale_bits, sizeof scale);
    __builtin_memcpy(&inverse, &inverse_bits, sizeof inverse);
    const V top = set1(448.0f), bottom = set1(-448.0f);
    a = mul(round_e4m3(min(top, max(bottom, mul(a, set1(inverse))))), set1(scale));
    b = mul(round_e4m3(min(top, max(bottom, mul(b, set1(inverse))))), set1(scale));
}
