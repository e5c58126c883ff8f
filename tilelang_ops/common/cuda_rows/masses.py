"""Masses of tokens: the reference's integers, and float32 numbers of known error."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.row import added, reduce_block, whole_branch

MASS_POLYNOMIAL = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@T.macro
def mass_of(distance):
    """floor(exp(distance) * 2^40) of a float32 <= 0 as int64: `exp_mass` of the reference, step by step."""
    x = keep(T.max(distance, T.float32(-60.0)))
    turned = keep(T.ieee_add(x * T.float32(1.44269504), T.float32(12582912.0)))
    n = keep(T.ieee_sub(turned, T.float32(12582912.0)))
    remainder = keep((x - n * T.float32(0.693359375)) + n * T.float32(2.12194440e-4))
    p = T.alloc_local((1,), "float32")
    p[0] = T.float32(1.9875691500e-4)
    for coefficient in MASS_POLYNOMIAL:
        p[0] = p[0] * remainder + T.float32(coefficient)
    p[0] = p[0] * remainder * remainder + remainder + T.float32(1.0)
    scale = (T.reinterpret(turned, "uint32") << T.uint32(23)) + T.uint32((127 + 40) << 23)
    return keep(T.cast(p[0] * T.reinterpret(scale, "float32"), "int64"))


@T.macro
def add_masses(r, base):
    """Sums the masses of a group: above the places in question, and of all that count."""
    for j in T.unroll(4):
        if r.scores[base + j] >= r.floor[0] and r.places[j] >= r.k_place[0]:
            mass = mass_of(r.scores[base + j] - r.peak[0])
            r.sum_all[0] = r.sum_all[0] + mass
            if r.places[j] > r.high[0]:
                r.sum_above[0] = r.sum_above[0] + mass
        else:
            whole_branch(r)


@T.macro
def add_near_masses(r, base):
    """The same in float32."""
    for j in T.unroll(4):
        counts = r.scores[base + j] >= r.floor[0] and r.places[j] >= r.k_place[0]
        r.near[j] = T.if_then_else(counts, T.__exp(r.scores[base + j] - r.peak[0]), T.float32(0.0))
    r.near_all[0] = r.near_all[0] + ((r.near[0] + r.near[1]) + (r.near[2] + r.near[3]))
    for j in T.unroll(4):
        r.near[j] = T.if_then_else(r.places[j] > r.high[0], r.near[j], T.float32(0.0))
    r.near_above[0] = r.near_above[0] + ((r.near[0] + r.near[1]) + (r.near[2] + r.near[3]))


@T.macro
def take_near(r, blur):
    """Float32 masses as integers; they are off by 2^-15 of all at most, and by another share `blur`.

    A thread's 2^7 additions cost as many roundings of 2^-24, and an exponential is as good as 2^-18.
    """
    r.mass_above[0] = T.cast(r.near_above[0] * T.float32(2.0**40), "int64")
    r.mass_all[0] = T.cast(r.near_all[0] * T.float32(2.0**40), "int64")
    # A comparison has a mass on both sides.
    doubt = r.near_all[0] * (T.float32(2.0**-14) + blur)
    r.doubt[0] = T.cast(doubt * T.float32(2.0**40), "int64") + T.int64(1)


@T.macro
def finish_masses(r):
    """Masses of the whole row, after the walk."""
    if r.is_exact[0] == 1:
        reduce_block(r, r.sum_above, added)
        reduce_block(r, r.sum_all, added)
        r.mass_above[0] = r.sum_above[0]
        r.mass_all[0] = r.sum_all[0]
        r.doubt[0] = T.int64(0)
    else:
        reduce_block(r, r.near_above, added)
        reduce_block(r, r.near_all, added)
        take_near(r, T.float32(0.0))
