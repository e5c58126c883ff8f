"""Prints expressions as C++ on the runtime's types."""

from __future__ import annotations

import math
import re
from typing import Any

from tests.support.emulator.nodes import C_TYPES, Unsupported, c_type, is_float, kind_of, op_of

ARITHMETIC = {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "Div": "divide",
    "Mod": "remainder",
    "FloorDiv": "floor_divide",
    "FloorMod": "floor_modulo",
    "Min": "minimum",
    "Max": "maximum",
    "And": None,
    "Or": None,
}
COMPARISONS = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="}
# Functions of one number, computed in float (or double); the GPU's own may differ in the last bits.
FUNCTIONS = {
    **{f: f"std::{f}" for f in ("exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "tanh", "sqrt")},
    **{f: f"std::{f}" for f in ("sin", "cos", "tan", "atan", "erf", "floor", "ceil", "trunc", "nearbyint")},
    **{f"__{f}": f"std::{f}" for f in ("exp", "log", "log2", "log10", "sin", "cos", "tan")},
    "fabs": "std::fabs",
    "abs": "std::fabs",
    "round": "std::nearbyint",
    "round_ties_away_from_zero": "std::round",
    "rsqrt": "1 / std::sqrt",
    "ieee_fsqrt": "std::sqrt",
    "ieee_frsqrt": "1 / std::sqrt",
    "ieee_frcp": "1 / ",
    "fast_rcp": "1 / ",
    "sigmoid": "1 / (1 + std::exp(-{0}))",
    "__exp10": "std::pow(10.0f, {0})",
}
BINARY_FUNCTIONS = ("pow", "copysign", "fmod", "atan2", "hypot", "ldexp")
PREDICATES = ("isnan", "isinf", "isfinite")
BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
# Rounded once, never fused with a neighbour.
EXACT = {"ieee_add": "+", "ieee_sub": "-", "ieee_mul": "*", "ieee_fdiv": "/", "fmul": "*"}
FUSED = ("ieee_fmaf", "fma")
VOTES = {
    "ballot": "ballot",
    "ballot_sync": "ballot",
    "any_sync": "any_lane",
    "all_sync": "all_lanes",
    "activemask": "active_lanes",
    "syncthreads_count": "count_votes",
    "syncthreads_or": "any_thread",
    "syncthreads_and": "all_threads",
}
SHUFFLES = {
    "shfl_sync": "shuffle_from",
    "shfl_xor_sync": "shuffle_xor",
    "shfl_down_sync": "shuffle_down",
    "shfl_up_sync": "shuffle_up",
}
COMBINATIONS = {
    "sum": "Sum",
    "add": "Sum",
    "max": "Max",
    "min": "Min",
    "bitand": "BitAnd",
    "bitor": "BitOr",
    "or": "BitOr",
    "bitxor": "BitXor",
}
# CUDA functions that the runtime has under the name external<name>.
EXTERNALS = frozenset(
    f"__{name}"
    for name in (
        *"fadd_rn fsub_rn fmul_rn fdiv_rn frcp_rn fsqrt_rn fmaf_rn expf logf fdividef".split(),
        *"umulhi mulhi umul64hi popc popcll clz clzll ffs ffsll".split(),
        *"float_as_int float_as_uint int_as_float uint_as_float float2int_rn byte_perm".split(),
        *"bytes_of magnitude_digits relu_pair".split(),  # tilelang_ops/indexer/index_scores/fp8_program.py
    )
)


class Expressions:
    """Prints expressions; knows the C++ name of every variable seen."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def name(self, variable: Any) -> str:
        """C++ name of a variable: its own, made unique and a legal word by a number."""
        if variable not in self._names:
            word = re.sub(r"\W", "_", variable.name)
            self._names[variable] = f"{word}_{len(self._names)}"
        return self._names[variable]

    def position(self, buffer: Any, indices: Any) -> str:
        """Checked position of an element."""
        strides = self.strides(buffer)
        axes = "".join(
            f", Axis{{int64_t({self.expression(i)}), {size}, {stride}}}"
            for i, size, stride in zip(indices, self.sizes(buffer), strides, strict=True)
        )
        offset = self.expression(buffer.elem_offset)
        base = "" if offset.endswith("(0LL)") else f"int64_t({offset}) + "
        return f"{base}position({self.name(buffer.data)}{axes})"

    def sizes(self, buffer: Any) -> list[str]:
        """Extents of a buffer's axes."""
        return [f"int64_t({self.expression(size)})" for size in buffer.shape]

    def strides(self, buffer: Any) -> list[str]:
        """Elements between neighbours along each axis."""
        if len(buffer.strides):
            return [f"int64_t({self.expression(stride)})" for stride in buffer.strides]
        strides = ["1"]
        for size in reversed(self.sizes(buffer)[1:]):
            strides.insert(0, f"{strides[0]} * {size}")
        return strides

    def load(self, buffer: Any, indices: Any) -> str:
        """Value of an element."""
        where = f"{self.name(buffer.data)}, {self.position(buffer, indices)}"
        return f"load<{c_type(buffer.dtype)}>({where})"

    def expression(self, e: Any) -> str:
        """C++ of an expression; its type is `c_type(e.dtype)`.

        Raises:
            Unsupported: it contains something that the emulator does not know.
        """
        kind = kind_of(e)
        if isinstance(e, int):
            return f"int64_t({e}LL)"
        if kind == "Var":
            return self.name(e)
        if kind == "IntImm":
            return _integer(int(e.value), c_type(e.dtype))
        if kind == "FloatImm":
            return _number(float(e.value), c_type(e.dtype))
        if kind == "StringImm":
            return '""'
        if kind == "BufferLoad":
            return self.load(e.buffer, e.indices)
        if kind == "Cast":
            rounding = str((getattr(e, "annotations", None) or {}).get("round", "rn"))
            if rounding not in ("rn", ""):
                raise Unsupported(f"cast that rounds by {rounding!r}")
            return f"cast<{c_type(e.dtype)}>({self.expression(e.value)})"
        if kind == "Not":
            return f"!({self.expression(e.a)})"
        if kind == "Select":
            return self._choose(e.dtype, e.condition, e.true_value, e.false_value)
        if kind in ("And", "Or"):
            return f"({self.expression(e.a)} {'&&' if kind == 'And' else '||'} {self.expression(e.b)})"
        if kind in COMPARISONS:
            wide = f"Wide<{c_type(e.a.dtype)}>"
            return f"({wide}({self.expression(e.a)}) {COMPARISONS[kind]} {wide}({self.expression(e.b)}))"
        if kind in ARITHMETIC:
            return f"{ARITHMETIC[kind]}<{c_type(e.dtype)}>({self.expression(e.a)}, {self.expression(e.b)})"
        if kind == "Call":
            return self.call(e)
        raise Unsupported(f"expression {kind}")

    def call(self, e: Any) -> str:
        """C++ of a call that has a value."""
        op, args = op_of(e), list(e.args)
        if op in ("call_extern", "call_pure_extern"):
            return self._external(e)
        if op == "if_then_else":
            return self._choose(e.dtype, *args)
        if op == "reinterpret":
            return f"emulator::bit_cast<{c_type(e.dtype)}>({self.expression(args[0])})"
        if op == "infinity":
            return f"cast<{c_type(e.dtype)}>(std::numeric_limits<float>::infinity())"
        if op == "large_uint_imm":
            low, high = (int(a.value) & 0xFFFFFFFF for a in args)
            return f"{c_type(e.dtype)}({high << 32 | low}ULL)"
        if op in ("get_warp_idx", "get_warp_idx_sync"):
            return "warp()"
        if op == "get_lane_idx":
            return "lane()"
        if op.endswith("elem_op"):
            return self.atomic(e)
        if op in ("likely", "__ldg"):
            return self.expression(args[0])
        printed = [self.expression(a) for a in args]
        if op in SHUFFLES:
            _mask, value, lane, *width = printed
            return f"{SHUFFLES[op]}<{c_type(e.dtype)}>({value}, {lane}, {width[0] if width else 'WARP'})"
        if op in VOTES:
            return f"{c_type(e.dtype)}({VOTES[op]}({f'({printed[-1]}) != 0' if args else ''}))"
        if op.startswith("warp_reduce_"):
            return self._reduce_warp(op.removeprefix("warp_reduce_"), c_type(e.dtype), printed[0])
        return self._function(op, e.dtype, printed)

    def _function(self, op: str, dtype: Any, args: list[str]) -> str:
        """A function of numbers alone."""
        result = c_type(dtype)
        wide = "double" if result == "double" else "float"
        if op in ("abs", "fabs") and not is_float(dtype):
            return f"{result}(std::abs({args[0]}))"
        if op in FUNCTIONS:
            text = FUNCTIONS[op] if "{" in FUNCTIONS[op] else f"{FUNCTIONS[op]}({{0}})"
            return f"cast<{result}>(Wide<{result}>({text.format(f'{wide}({args[0]})')}))"
        if op in BINARY_FUNCTIONS:
            return f"cast<{result}>(std::{op}({wide}({args[0]}), {wide}({args[1]})))"
        if op in PREDICATES:
            return f"std::{op}({wide}({args[0]}))"
        if op in BITWISE:
            return f"{result}({args[0]} {BITWISE[op]} {args[1]})"
        if op == "bitwise_not":
            return f"{result}(~{args[0]})"
        if op in ("shift_left", "shift_right"):
            return f"{op}<{result}>({args[0]}, {args[1]})"
        if op == "popcount":
            return f"{result}(__builtin_popcountll(uint64_t({args[0]})))"
        if op == "clz":
            return f"{result}(external__clz({args[0]}))"
        if op == "__ffs":
            return f"external__ffs({args[0]})"
        if op == "clamp":
            return f"minimum<{result}>(maximum<{result}>({args[0]}, {args[1]}), {args[2]})"
        if op in EXACT:
            value = f"Wide<{result}>({args[0]}) {EXACT[op]} Wide<{result}>({args[1]})"
            return f"{result}(rounded({value}))"
        if op == "mul2":
            return f"multiply_pairs({args[0]}, {args[1]})"
        if op in FUSED:
            return f"{result}(std::fma({', '.join(f'Wide<{result}>({a})' for a in args[:3])}))"
        raise Unsupported(f"operation {op}")

    def atomic(self, e: Any) -> str:
        """An atomic operation on one element; its value is the element before."""
        target = e.args[0].args[0]  # of the access_ptr
        kind = c_type(target.buffer.dtype)
        where = f"{self.name(target.buffer.data)}, {self.position(target.buffer, target.indices)}"
        operation = re.fullmatch(r"atomic_([a-z]+?)(_ret)?_elem_op", op_of(e))
        if operation and operation[1] == "load":
            return f"load<{kind}>({where})"
        value = f"cast<{kind}>({self.expression(e.args[1])})" if len(e.args) > 1 else ""
        if operation and operation[1] == "store":
            return f"store<{kind}>({where}, {value})"
        if not operation or operation[1] not in COMBINATIONS:
            raise Unsupported(f"operation {op_of(e)}")
        return f"exchange<{COMBINATIONS[operation[1]]}, {kind}>({where}, {value})"

    def _choose(self, dtype: Any, condition: Any, yes: Any, no: Any) -> str:
        kind = c_type(dtype)
        values = f"{kind}({self.expression(yes)}) : {kind}({self.expression(no)})"
        return f"({self.expression(condition)} ? {values})"

    def _external(self, e: Any) -> str:
        function, *args = e.args
        if function.value not in EXTERNALS:
            raise Unsupported(f"call of {function.value}")
        return f"external{function.value}({', '.join(self.expression(a) for a in args)})"

    def _reduce_warp(self, operation: str, kind: str, value: str) -> str:
        if operation not in COMBINATIONS:
            raise Unsupported(f"operation warp_reduce_{operation}")
        combine = f"{COMBINATIONS[operation]}::combine<Wide<{kind}>>(Wide<{kind}>(x), Wide<{kind}>(y))"
        return f"reduce_warp<{kind}>({value}, []({kind} x, {kind} y) {{ return cast<{kind}>({combine}); }})"


def _integer(value: int, kind: str) -> str:
    if kind == "bool":
        return "true" if value else "false"
    if kind not in C_TYPES.values() or "int" not in kind:
        return f"cast<{kind}>({value}.0f)"
    if value == -(2**63):
        return "std::numeric_limits<int64_t>::min()"
    return f"{kind}({value}{'ULL' if value >= 2**63 else 'LL'})"


def _number(value: float, kind: str) -> str:
    suffix = "" if kind == "double" else "f"
    limits = f"std::numeric_limits<{'double' if kind == 'double' else 'float'}>"
    if math.isnan(value):
        return f"cast<{kind}>({limits}::quiet_NaN())"
    if math.isinf(value):
        return f"cast<{kind}>({'-' if value < 0 else ''}{limits}::infinity())"
    return f"cast<{kind}>({value.hex()}{suffix})"
