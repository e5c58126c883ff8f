"""Index keys in MXFP4 on kernel expressions: codes and scales to bfloat16, in the order that products want.

    channel 32 t + 8 u + p + 4 e   is factor   2 (16 u + 4 p + t) + e      e = 0, 1;  p, t, u = 0..3

Decoded keys are the true ones / 2^64: one product with a power of two sets every usual scale right, and the
weights make up for it. (Exact for E8M0 bytes 60 to 192; larger ones count as 192, 255 is NaN, and what
smaller ones lose is below 2^-64.)
"""

import tilelang.language as T
from tilelang.cuda import language as TC

SHRINK = 64
NAN_PAIR = 0x7FC07FC0


def channel(factor):
    """The channel that is factor `factor` of the products."""
    pair, e = factor // 2, factor % 2
    return pair % 4 * 32 + pair // 16 * 8 + pair // 4 % 4 + e * 4


def decode_pair(word, p):
    """Codes p and p + 4 of a word as bfloat16 bits of value * 2^-126.

    One product copies the code to where its sign belongs and to where its magnitude does.
    """
    codes = T.if_then_else(p < 2, word, word >> T.uint32(8))
    first = (codes & T.uint32(0x000F000F)) * T.uint32((1 << 12) | (1 << 6))
    second = (codes & T.uint32(0x00F000F0)) * T.uint32((1 << 8) | (1 << 2))
    return T.if_then_else(p % 2 == 0, first, second) & T.uint32(0x81C081C0)


def power_pair(scales, t):
    """2^(126 - SHRINK) times scale t of a key's word of scales, twice in bfloat16."""
    byte = (T.cast(scales, "uint32") >> T.cast(8 * t, "uint32")) & T.uint32(255)
    power = (T.min(byte, T.uint32(128 + SHRINK)) + T.uint32(126 - SHRINK)) * T.uint32(0x00800080)
    return T.if_then_else(byte == T.uint32(255), T.uint32(NAN_PAIR), power)


def times(pair, power):
    """Product of two pairs of bfloat16."""
    product = TC.mul2(T.reinterpret(pair, "bfloat16x2"), T.reinterpret(power, "bfloat16x2"))
    return T.reinterpret(product, "uint32")


def lane_of(i, t):
    """The thread whose registers have scale group t of key i of a tile, as the instruction wants it."""
    return i // 16 * 32 + i % 8 * 4 + t
