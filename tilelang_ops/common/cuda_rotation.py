"""Rotation of a thread's channels by position, in the programs that go on with them."""

import tilelang.language as T


@T.macro
def rotate_pairs(v, cos, sin, row, pair, direction, source):
    """Rotate four pairs of neighbouring channels in place, rounding each result to `source`.

    Args:
        v: 8 float32 of a thread.
        cos, sin: [rows, pairs] float32.
        row: of `cos` and `sin`.
        pair: the first, a multiple of 4.
        direction: -1.0 to rotate back, else 1.0.
        source: dtype that values are rounded to.
    """
    c = T.alloc_local((4,), "float32")
    s = T.alloc_local((4,), "float32")
    for k in T.vectorized(4):
        c[k] = cos[row, pair + k]
    for k in T.vectorized(4):
        s[k] = sin[row, pair + k] * direction
    for k in T.unroll(4):
        a = v[2 * k]
        b = v[2 * k + 1]
        v[2 * k] = T.cast(T.cast(a * c[k] - b * s[k], source), "float32")
        v[2 * k + 1] = T.cast(T.cast(a * s[k] + b * c[k], source), "float32")
