"""`row_codes` on kernel expressions, bit for bit; see `cuda_numerics` for what the functions take.

A value of a group becomes a code twice: `e4m3(value * e8m0_inverse(byte of the group))`, then that code's
value times `group_in_unit`, rounded to E4M3 once more.
"""

import tilelang.language as T

from tilelang_ops.common.cuda_numerics import e8m0_value


def group_in_unit(group_byte, unit_byte):
    """Float32 scale of a group over that of its unit, a power of two of at most 1; what is below 2^-127
    changes no code."""
    return e8m0_value(T.max(group_byte - unit_byte + 127, 0))


def unit_code(x, inverse, share):
    """E4M3 code of a float32 x.

    Args:
        x: a value.
        inverse: `e8m0_inverse` of its group.
        share: `group_in_unit` of its group.
    """
    rounded = T.cast(T.cast(x * inverse, "float8_e4m3fn"), "float32")
    return T.cast(rounded * share, "float8_e4m3fn")
