"""CUDA programs on Ascend: the blocks of a launch become turns of the vector cores' SIMT threads.

A program without matrix products says little that belongs to CUDA alone: a grid of blocks, threads that share
memory, loops and reductions over tiles. Ascend 950 runs such code in a SIMT section of a vector core. Its
grid is one-dimensional and as long as there are cores, so core c takes the blocks c, c + num_cores, ...:

    CUDA       block (x, y, z)     threads          shared memory      registers
    Ascend     turn i of core c    SIMT threads     unified buffer     registers

Such kernels are lowered to AscendC source in the tests and have not run on a device.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

NUM_CORES = 64  # length of the grid; a device with fewer vector cores queues the rest
AXES = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
MAX_BYTES_AT_ONCE = 4  # longest vector of bytes that a SIMT thread loads or stores

# Warp shuffles (mask, value, lane, width) of whole warps.
SHUFFLES = {
    "tl.shfl_sync": "asc_shfl",
    "tl.shfl_xor_sync": "asc_shfl_xor",
    "tl.shfl_up_sync": "asc_shfl_up",
    "tl.shfl_down_sync": "asc_shfl_down",
}
# Operations that CUDA must be asked to round on their own, as Ascend does anyway; and such as it has no name
# for.
PLAIN = {
    "tl.ieee_add": lambda a, b, *_: a + b,
    "tl.ieee_sub": lambda a, b, *_: a - b,
    "tl.ieee_mul": lambda a, b, *_: a * b,
    "tl.ieee_fdiv": lambda a, b, *_: a / b,
    "tl.ieee_frcp": lambda a, *_: 1.0 / a,
    "tl.ieee_fsqrt": lambda a, *_: tirx.sqrt(a),
    "tl.ieee_frsqrt": lambda a, *_: tirx.rsqrt(a),
    "tl.ieee_fmaf": lambda a, b, c, *_: tirx.call_extern(a.dtype, "fmaf", a, b, c),
    "tl.fast_rcp": lambda a, *_: 1.0 / a,
    "tl.__exp": lambda a, *_: tirx.exp(a),
    "tl.__log": lambda a, *_: tirx.log(a),
    "tirx.popcount": lambda a, *_: _num_bits(a),
}


def on_vector_cores(program: tirx.PrimFunc, num_cores: int = NUM_CORES) -> tirx.PrimFunc:
    """The Ascend program of a CUDA program.

    Args:
        program: traced, not lowered; one launch, without matrix products.
        num_cores: length of the Ascend grid.
    """
    root = program.body.block
    loops, statement = [], root.body
    while isinstance(statement, tirx.For) and statement.thread_binding is not None:
        loops.append(statement)
        statement = statement.body
    *placeholders, realize = statement.seq
    block, threads = realize.block, [bind.var for bind in placeholders]
    core = tirx.Var("core", "int32")
    shared = [b for b in block.alloc_buffers if str(b.scope()).startswith("shared")]
    section = _simt_section(block, loops, threads, core, num_cores, bool(shared))
    launch = tirx.SBlock([], [], [], block.name_hint, section, None, shared, [], {})
    names = [tirx.Bind(tirx.Var(bind.var.name, "int32"), bind.value) for bind in placeholders]
    grid = tirx.For(
        core,
        0,
        num_cores,
        tirx.ForKind.THREAD_BINDING,
        tirx.SeqStmt([*names, tirx.SBlockRealize([], True, launch)]),
        tirx.IterVar(None, tirx.Var("blockIdx_x", "int32"), tirx.IterVar.ThreadIndex, "blockIdx.x"),
    )
    whole = tirx.SBlock([], [], [], root.name_hint, grid, None, root.alloc_buffers, [], root.annotations)
    return program.with_body(tirx.SBlockRealize([], True, whole))


def _simt_section(
    block: tirx.SBlock,
    loops: list[tirx.For],
    threads: list[tirx.Var],
    core: tirx.Var,
    num_cores: int,
    shares_memory: bool,
) -> tirx.SBlock:
    """The threads of one core, going through its blocks."""
    turn, number, total = tirx.Var("turn", "int32"), tirx.Var("number", "int32"), 1
    body = [tirx.Bind(number, core + turn * num_cores)]
    index: Any = number
    for loop in sorted(loops, key=lambda loop: loop.thread_binding.thread_tag):  # x runs fastest
        body.append(tirx.Bind(loop.loop_var, tirx.floormod(index, loop.extent)))
        index, total = tirx.floordiv(index, loop.extent), total * loop.extent
    body.append(_in_ascend(block.body, threads[0]))
    if shares_memory:  # the next turn writes what slower threads of this one still read
        body.append(_barrier())
    extents = [int(extent) for extent in block.annotations["tl.launch_threads"]]
    annotations = {k: v for k, v in block.annotations.items() if k != "tl.launch_threads"}
    private = [b for b in block.alloc_buffers if not str(b.scope()).startswith("shared")]
    one = tirx.SBlock([], [], [], "turn", tirx.SeqStmt(body), None, private, [], annotations)
    turns = tirx.floordiv(total - core + (num_cores - 1), num_cores)
    statement: Any = tirx.For(turn, 0, turns, tirx.ForKind.SERIAL, tirx.SBlockRealize([], True, one))
    statement = tirx.AttrStmt("simtvf", "tl.simtvf_scope", 1, statement)
    for thread, axis, extent in reversed(list(zip(threads, AXES, extents))):
        variable = tirx.IterVar(ir.Range(0, extent), thread, tirx.IterVar.ThreadIndex, axis)
        statement = tirx.AttrStmt(variable, "thread_extent", extent, statement)
    source_index = {"tl.vf_source_index": tirx.IntImm("int64", 0)}
    return tirx.SBlock([], [], [], "SIMT_VF", statement, None, [], [], source_index)


def _in_ascend(body: tirx.Stmt, thread: tirx.Var) -> tirx.Stmt:
    """The statements with Ascend's names for what CUDA offers, and without what its SIMT threads lack."""

    def replace(node: Any) -> Any:
        if isinstance(node, tirx.For):
            return _short_bytes(node)
        if isinstance(node, tirx.Evaluate):
            is_scan = isinstance(node.value, tirx.Call) and node.value.op.name == "tl.tileop.cumsum"
            return _running_sum(node.value, thread) if is_scan else node
        name = getattr(node.op, "name", "")
        if name in SHUFFLES:
            return tirx.call_extern(node.dtype, SHUFFLES[name], node.args[1], node.args[2])
        return PLAIN[name](*node.args) if name in PLAIN else node

    return ir_transform(body, None, replace, ["tirx.Call", "tirx.For", "tirx.Evaluate"])


def _short_bytes(loop: tirx.For) -> tirx.For:
    """A vector loop, unrolled where it moves more bytes at once than a SIMT thread can."""
    if loop.kind != tirx.ForKind.VECTORIZED or int(loop.extent) <= MAX_BYTES_AT_ONCE:
        return loop
    dtypes = set()

    def look(node: Any) -> None:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            dtypes.add(str(node.buffer.dtype))

    post_order_visit(loop.body, look)
    if dtypes.isdisjoint({"uint8", "int8"}):
        return loop
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)


def _running_sum(scan: tirx.Call, thread: tirx.Var) -> tirx.Stmt:
    """`T.cumsum` of a line of shared memory, by the first thread; Ascend has no such operation."""
    source, target, extent = scan.args[0].args[0], scan.args[1].args[0], scan.args[0].args[2]
    assert len(source.indices) == 1 and not bool(scan.args[3]), "only a line, from its start"
    i = tirx.Var("i", "int32")
    start, first = target.indices[0], source.indices[0]
    before = tirx.BufferLoad(target.buffer, [tirx.max(start + i - 1, start)])
    value = tirx.BufferLoad(source.buffer, [first + i]) + tirx.if_then_else(
        i > 0, before, tirx.const(0, target.buffer.dtype)
    )
    store = tirx.BufferStore(target.buffer, value, [start + i])
    scan_loop = tirx.For(i, 0, extent, tirx.ForKind.SERIAL, store)
    return tirx.SeqStmt([_barrier(), tirx.IfThenElse(thread == 0, scan_loop, None), _barrier()])


def _num_bits(word: tirx.PrimExpr) -> tirx.PrimExpr:
    """Bits set in a 32-bit word: sums in pairs, fours and bytes, then of the bytes."""
    unsigned = tirx.reinterpret("uint32", word)

    def constant(value: int) -> tirx.PrimExpr:
        return tirx.const(value, "uint32")

    def part(value: tirx.PrimExpr, shift: int, mask: int) -> tirx.PrimExpr:
        return tirx.bitwise_and(tirx.shift_right(value, constant(shift)), constant(mask))

    pairs = unsigned - part(unsigned, 1, 0x55555555)
    fours = part(pairs, 0, 0x33333333) + part(pairs, 2, 0x33333333)
    by_byte = part(fours + tirx.shift_right(fours, constant(4)), 0, 0x0F0F0F0F)
    return tirx.Cast(word.dtype, tirx.shift_right(by_byte * constant(0x01010101), constant(24)))


def _barrier() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
