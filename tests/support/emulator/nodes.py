"""What printing needs to know about the nodes of a TileLang program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# TileLang's type -> the runtime's.
C_TYPES = {
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": "float",
    "float64": "double",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "bfloat16x2": "bfloat16x2",
    "float8_e4m3fn": "e4m3",
    "float8_e4m3": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e8m0fnu": "e8m0",
    "float4_e2m1fn": "e2m1",
}
# Scopes of memory that every thread has a copy of.
PRIVATE_SCOPES = ("local", "local.var")
# Memory of an Ascend cube core; what else a program for Ascend allocates, each of its vector cores has.
CUBE_SCOPES = ("shared.l1", "shared.l0a", "shared.l0b", "shared.l0c")
SERIAL, PARALLEL, THREAD_BINDING = 0, 1, 4  # kinds of loops that matter here


class Unsupported(Exception):
    """The program uses something that the emulator does not know."""


def kind_of(node: Any) -> str:
    """Name of a node's class."""
    return type(node).__name__


def op_of(call: Any) -> str:
    """Name of what a call calls, without its namespace: "copy", "gemm", "exp"."""
    return getattr(call.op, "name", str(call.op)).rpartition(".")[2]


def c_type(dtype: Any) -> str:
    """The runtime's type for a TileLang type."""
    name = str(dtype)
    if name.startswith("handle"):
        return "void*"
    if name not in C_TYPES:
        raise Unsupported(f"type {name}")
    return C_TYPES[name]


def is_float(dtype: Any) -> bool:
    """Whether a type holds fractions."""
    return "float" in str(dtype)


def visit(node: Any, call: Callable[[Any], None]) -> None:
    """Call a function on every node below `node`, children first."""
    from tvm.tirx.stmt_functor import post_order_visit

    post_order_visit(node, call)


def uses_threads(body: Any) -> bool:
    """Whether the program says what single threads do."""
    thread_variables, used, ops = [], set(), set()

    def look(node: Any) -> None:
        kind = kind_of(node)
        if kind == "Bind" and kind_of(node.value) == "Call" and op_of(node.value) == "launch_thread_idx":
            thread_variables.append(node.var)
        elif kind == "Var":
            used.add(node)
        elif kind == "Call":
            ops.add(op_of(node))

    visit(body, look)
    per_thread = ("shfl", "warp", "lane", "ballot", "activemask", "_sync", "syncthreads")
    return any(v in used for v in thread_variables) or any(word in op for op in ops for word in per_thread)


def is_vector_core_loop(node: Any) -> bool:
    """Whether a loop is over the vector cores of a cube core."""
    return kind_of(node) == "For" and int(node.kind) == THREAD_BINDING and _tag(node) == "cthread"


def uses_vector_cores(body: Any) -> bool:
    """Whether the program is one for Ascend's cube and vector cores."""
    found = []
    visit(body, lambda node: found.append(node) if is_vector_core_loop(node) else None)
    return bool(found)


def _tag(loop: Any) -> str:
    return str(loop.thread_binding.thread_tag)


def block_facts(body: Any) -> tuple[list[Any], tuple[int, int, int], dict[Any, str]]:
    """Buffers that one kernel allocates, its threads in x, y and z, and the operation of each reducer."""
    buffers: dict[Any, Any] = {}
    threads = [(128, 1, 1)]
    reducers: dict[Any, str] = {}

    def look(node: Any) -> None:
        kind = kind_of(node)
        if kind == "AllocBuffer":
            buffers.setdefault(node.buffer.data, node.buffer)
        if kind != "SBlock":
            return
        for buffer in node.alloc_buffers:
            buffers.setdefault(buffer.data, buffer)
        if "tl.launch_threads" in node.annotations:
            threads.append(tuple(int(n) for n in node.annotations["tl.launch_threads"]))
        for key in ("reducer_info_v2", "reducer_info"):
            if key in node.annotations:
                reducers.update((data, str(info["op"])) for data, info in node.annotations[key].items())

    visit(body, look)
    return list(buffers.values()), threads[-1], reducers
