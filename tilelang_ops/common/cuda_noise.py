"""The noise of `noise` on kernel expressions, bit for bit where a function says exact.

Programs that use the exact noise are built with `EXACT`, which forbids the compiler to fuse a product and a
sum that were written apart.
"""

import tilelang.language as T

from tilelang_ops.common import noise
from tilelang_ops.common.noise import KEY_STEPS, MULTIPLIERS, ROUNDS, exponent_of

log64 = T.macro(noise.log64)

EXACT = {"tl.device_compile_flags": ["-fmad=false"]}


@T.macro
def philox_words(words, group, seed, index, domain):
    """The words of token ids 4 * group ... 4 * group + 3 into words[0:4] (uint32); seed and index int64."""
    _rounds(words, group, index, domain, lambda word, step: _round_key(seed, word, step))


@T.macro
def philox_words_by_keys(words, group, keys, domain):
    """The same with what `put_keys` made of the seed and the index."""
    c0 = T.alloc_local((1,), "uint32")
    c1 = T.alloc_local((1,), "uint32")
    c2 = T.alloc_local((1,), "uint32")
    c3 = T.alloc_local((1,), "uint32")
    # The first three rounds, without what is the same in all groups.
    first = T.cast(group, "uint64") * T.uint64(MULTIPLIERS[0])
    c2[0] = _high(first) ^ T.cast(domain, "uint32") ^ keys[1]
    second = T.cast(c2[0], "uint64") * T.uint64(MULTIPLIERS[1])
    c0[0] = _high(second) ^ keys[0]
    c1[0] = T.cast(second, "uint32")
    c2[0] = T.cast(first, "uint32") ^ keys[2]
    left = T.cast(c0[0], "uint64") * T.uint64(MULTIPLIERS[0])
    right = T.cast(c2[0], "uint64") * T.uint64(MULTIPLIERS[1])
    c0[0] = _high(right) ^ c1[0] ^ keys[4]
    c1[0] = T.cast(right, "uint32")
    c2[0] = _high(left) ^ keys[3]
    c3[0] = T.cast(left, "uint32")
    for step in T.unroll(3, ROUNDS):
        _round(c0, c1, c2, c3, keys[2 * step], keys[2 * step + 1])
    words[0] = c0[0]
    words[1] = c1[0]
    words[2] = c2[0]
    words[3] = c3[0]


@T.macro
def philox_words_by_first_keys(words, group, keys, index, domain):
    """The same from the keys of the first round alone: less that does not change in a loop."""
    _rounds(words, group, index, domain, lambda word, step: _later_key(keys[5 - 4 * word], word, step))


@T.macro
def put_keys(keys, seed, index, thread):
    """Writes keys[0 : 2 * ROUNDS] from `ROUNDS` threads; seed and index int64.

    Keys of a round are in keys[2 * step : 2 * step + 2] from the fourth on. Before are those of the first
    round in keys[5] and keys[1], and what the index and keys are to the second and third.
    """
    if thread == 0:
        product = T.cast(T.cast(index >> 32, "uint32"), "uint64") * T.uint64(MULTIPLIERS[1])
        word = _high(product) ^ T.cast(index, "uint32") ^ _round_key(seed, 0, 0)
        next_product = T.cast(word, "uint64") * T.uint64(MULTIPLIERS[0])
        keys[0] = T.cast(product, "uint32") ^ _round_key(seed, 0, 1)
        keys[1] = _round_key(seed, 1, 0)
        keys[2] = _high(next_product) ^ _round_key(seed, 1, 1)
        keys[3] = T.cast(next_product, "uint32") ^ _round_key(seed, 1, 2)
        keys[4] = _round_key(seed, 0, 2)
        keys[5] = _round_key(seed, 0, 0)
    elif thread > 2:
        for word in (0, 1):
            keys[2 * thread + word] = _round_key(seed, word, thread)


def _high(product):
    return T.cast(product >> T.uint64(32), "uint32")


@T.macro
def _round(c0, c1, c2, c3, key0, key1):
    product0 = T.cast(c0[0], "uint64") * T.uint64(MULTIPLIERS[0])
    product1 = T.cast(c2[0], "uint64") * T.uint64(MULTIPLIERS[1])
    c0[0] = _high(product1) ^ c1[0] ^ key0
    c1[0] = T.cast(product1, "uint32")
    c2[0] = _high(product0) ^ c3[0] ^ key1
    c3[0] = T.cast(product0, "uint32")


@T.macro
def _rounds(words, group, index, domain, key_of):
    c0 = T.alloc_local((1,), "uint32")
    c1 = T.alloc_local((1,), "uint32")
    c2 = T.alloc_local((1,), "uint32")
    c3 = T.alloc_local((1,), "uint32")
    c0[0] = T.cast(group, "uint32")
    c1[0] = T.cast(index, "uint32")
    c2[0] = T.cast(index >> 32, "uint32")
    c3[0] = T.cast(domain, "uint32")
    for step in T.unroll(ROUNDS):
        _round(c0, c1, c2, c3, key_of(0, step), key_of(1, step))
    words[0] = c0[0]
    words[1] = c1[0]
    words[2] = c2[0]
    words[3] = c3[0]


def _round_key(seed, word, step):
    half = seed if word == 0 else seed >> 32
    return _later_key(T.cast(half, "uint32"), word, step)


def _later_key(first, word, step):
    return first + T.uint32(KEY_STEPS[word]) * T.cast(step, "uint32")


@T.macro
def keep(value):
    """A variable that holds the value. The compiler's analysis sees through names, and long chains of names
    that are used twice would grow without bound; it stops at variables."""
    variable = T.alloc_local((1,), value.dtype)
    variable[0] = value
    return variable[0]


@T.macro
def log_exact(x):
    """`noise.log` of a positive float64 expression."""
    bits = keep(T.reinterpret(x, "int64"))
    k = keep(exponent_of(bits))
    f = keep(T.reinterpret(bits - (k << 52), "float64") - T.float64(1.0))
    return keep(log64(f, T.cast(k, "float64"), keep))


@T.macro
def noise_exact(word):
    """`noise.gumbel` of a uint32 word: float32."""
    above = (T.float64(2.0**32 - 0.5) - T.cast(word, "float64")) * T.float64(2.0**-32)
    return T.cast(-log_exact(-log_exact(above)), "float32")


@T.macro
def noise_near(word):
    """The same within 1e-5, from the fast logarithm; float32."""
    u = keep((T.cast(word, "float32") + T.float32(0.5)) * T.float32(2.0**-32))
    above = keep((T.cast(~word, "float32") + T.float32(0.5)) * T.float32(2.0**-32))
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return -T.__log(T.if_then_else((word >> T.uint32(27)) == T.uint32(0), series, -T.__log(above)))
