"""Number formats of `numerics` on kernel expressions, bit for bit.

Functions take and return scalar expressions: float32 values, int32 bits and codes. The largest magnitude of
a group is found among `magnitude_bits` as an integer maximum, in which a NaN is above infinity; so it reaches
the scale, as `numerics` demands. Codes under a NaN scale mean nothing.

    scale byte      of `numerics`               here, from the bits of the largest magnitude
    FP8             2^ceil(log2(amax / 448))    exponent - 8, + 1 where the mantissa is above that of 1.75
    MXFP4           2^ceil(log2(amax / 6))      exponent - 2, + 1 where the mantissa is above that of 1.5

A rounded quotient is above a power of two exactly where the quotient is: the next float behind 1.75 * 2^k or
1.5 * 2^k divides to more than half a unit above. Scales are powers of two, so multiplying by `e8m0_inverse`
rounds as dividing does.
"""

import tilelang.language as T

EXPONENT = 0x7F800000  # bits of infinity
ONE = 0x3F800000
_FP8_FLOOR = 0x38D1B717  # 1e-4
_MXFP4_FLOOR = 0x01C00000  # 6 * 2^-126
_FP4_FLOOR = 0x3C400000  # 6 * 2^-9


def record_row(record, records, stride):
    """Row of a record's pool in `records.flat_rows`: int32 all; `records` of a part lie in `stride` rows."""
    part = T.cast(record, "uint32") // T.cast(records, "uint32")
    place = T.cast(record, "uint32") % T.cast(records, "uint32")
    return T.cast(part, "int32") * stride + T.cast(place, "int32")


def float_bits(x):
    """Bits of a float32 as int32."""
    return T.reinterpret(x, "int32")


def bits_float(bits):
    """Float32 of int32 bits."""
    return T.reinterpret(bits, "float32")


def magnitude_bits(x):
    """Bits of |x|: as integers they are ordered as magnitudes are, NaN last."""
    return float_bits(x) & 0x7FFFFFFF


def fp8_scale_byte(amax_bits):
    """E8M0 byte of an FP8 group, int32."""
    bits = T.max(amax_bits, _FP8_FLOOR)
    return T.if_then_else(amax_bits >= EXPONENT, 255, ((bits + 0x1FFFFF) >> 23) - 8)


def mxfp4_scale_byte(amax_bits):
    """E8M0 byte of an MXFP4 group, int32."""
    bits = T.max(amax_bits, _MXFP4_FLOOR)
    return T.if_then_else(amax_bits >= EXPONENT, 255, ((bits + 0x3FFFFF) >> 23) - 2)


def fp4_scale(amax_bits):
    """E4M3 scale of an FP4 group: nearest of a sixth, saturating, NaN for NaN."""
    largest = bits_float(T.max(amax_bits, _FP4_FLOOR))
    return T.cast(T.ieee_fdiv(largest, T.float32(6.0)), "float8_e4m3fn")


def e8m0_value(byte):
    """Float32 2^(byte - 127) of an int32 byte; 255 is NaN."""
    return bits_float(T.max(byte << 23, 0x400000) | T.if_then_else(byte == 255, 0x400000, 0))


def e8m0_inverse(byte):
    """Float32 2^(127 - byte), exact; NaN for 255."""
    exact = T.max((254 - byte) << 23, 0x400000)
    return bits_float(T.if_then_else(byte == 255, EXPONENT | 0x400000, exact))


def e4m3_code(x):
    """Nearest E4M3 of a float32, ties to even, saturating at 448; NaN gives 0x7F. Result uint8."""
    return T.reinterpret(T.cast(x, "float8_e4m3fn"), "uint8")


def e4m3_value(code):
    """Float32 of a uint8 E4M3 code."""
    return T.cast(T.reinterpret(code, "float8_e4m3fn"), "float32")


def amax_bits(largest, total):
    """Magnitude bits of a group from a maximum that may have passed over NaNs, and a sum of magnitudes that
    is NaN where one is."""
    return T.if_then_else(T.isnan(total), EXPONENT | 0x400000, float_bits(largest))


def e2m1_aligned(y):
    """Nearest E2M1 of float32 |y| < 7, ties to even: an int32 with the code in bits 22 to 24, else 0.

    With an exponent e of at least 0, E2M1's step is 2^(e - 1). Adding 1.5 * 2^(e + 22) and taking it away
    again rounds to that step. A number that E2M1 has shows its code as float bits when 2^126 times smaller.
    What is larger gives more than 7 << 22.
    """
    octave = bits_float(T.max(float_bits(y) & EXPONENT, ONE))
    magic = T.float32(1.5 * 2.0**22)
    rounded = T.ieee_fmaf(octave, -magic, T.ieee_fmaf(octave, magic, y))
    return float_bits(T.abs(rounded) * T.float32(2.0**-126))


def e2m1_magnitude(m):
    """Code of float32 m >= 0 without its sign: nearest E2M1, ties to even, saturating; NaN saturates.

    The code is 2 m below 2, m + 2 up to 4 and m / 2 + 4 behind: the least of the three, and 7 at most. Each
    is rounded to an integer by adding 1.5 * 2^23, in whose low bits it is found.
    """
    base = 1.5 * 2.0**23
    steps = T.min(m * T.float32(2.0) + T.float32(base), m + T.float32(base + 2.0))
    steps = T.min(steps, T.min(m * T.float32(0.5) + T.float32(base + 4.0), T.float32(base + 7.0)))
    return float_bits(steps) & 7


def pack_e2m1(aligned, signs):
    """A word of eight codes, the first in the low bits.

    Args:
        aligned: eight results of `e2m1_aligned`.
        signs: eight float32 with the codes' signs.
    """
    word = 0
    for pair in range(4):
        # Not a sum: ptxas 13.0 drops the second summand of one that is shifted right.
        codes = aligned[2 * pair] | (aligned[2 * pair + 1] << 4)
        word = word | (codes >> (22 - 8 * pair) if pair < 3 else codes << 2)
    for place in range(8):
        sign = T.reinterpret(signs[place], "uint32") >> T.uint32(28 - 4 * place)
        word = word | (T.reinterpret(sign, "int32") & (8 << 4 * place if place < 7 else -(1 << 31)))
    return word


def e2m1_word(scaled, signs):
    """A word (uint32) of eight codes, the first in the low bits: the codes of `e2m1_code`.

    What a rounded number of steps has above its low bits is the same for all, so it is taken off at the end.

    Args:
        scaled: eight float32 that give the magnitudes.
        signs: eight float32 that give the signs.
    """
    base = 1.5 * 2.0**23
    steps, negative = T.uint32(0), T.uint32(0)
    for place in reversed(range(8)):
        m = T.abs(scaled[place])
        count = T.min(m * T.float32(2.0) + T.float32(base), m + T.float32(base + 2.0))
        count = T.min(count, T.min(m * T.float32(0.5) + T.float32(base + 4.0), T.float32(base + 7.0)))
        steps = steps * T.uint32(16) + T.reinterpret(count, "uint32")
        sign = (T.reinterpret(signs[place], "uint32") >> T.uint32(28)) & T.uint32(8)
        negative = negative * T.uint32(16) + sign
    return (steps - T.uint32(sum(0x4B400000 << 4 * place for place in range(8)) & 0xFFFFFFFF)) | negative


def e2m1_code(x, scaled=None):
    """Code of a float32 with its sign in bit 3, int32.

    Args:
        x: gives the sign.
        scaled: gives the magnitude; x itself when None.
    """
    magnitude = e2m1_magnitude(T.abs(x if scaled is None else scaled))
    return magnitude | ((float_bits(x) >> 28) & 8)


def e2m1_value(code):
    """Float32 of a code in the low four bits of an int32; higher bits must be clear.

    Exponent and mantissa stand where a float's begin, too small by 2^126.
    """
    return bits_float(((code & 7) << 22) | ((code & 8) << 28)) * T.float32(2.0**126)


def fp4_quotient(x, scale, inverse):
    """x / scale, rounded well enough for E2M1, where `scale` is an E4M3 number and `inverse` its reciprocal.

    One correction of x * inverse leaves less than the distance of any float x / scale from a rounding
    boundary of E2M1 that is not on it; on a boundary the result is exact. So codes equal those of a division.
    """
    rough = x * inverse
    return T.ieee_fmaf(T.ieee_fmaf(-rough, scale, x), inverse, rough)
