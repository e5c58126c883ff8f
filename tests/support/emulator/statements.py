"""Prints a traced program as a C++ function.

Blocks run one after another, and parallel loops serially; both backwards in a reversed run. Where the program
speaks of single threads, those of a block are fibers: what they do together (tile operators, parallel loops,
stores to fragments) one of them does between two barriers. Under `if thread < n` the threads of each branch
are a group of their own, and do such things without the others.

In a program for Ascend's cube and vector cores the threads are the vector cores of a cube core. Each has its
own of all memory but the cube core's, where they meet: what touches that memory and global memory alone the
cube core does, between two barriers. Loops over SIMT threads are serial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.emulator.expressions import COMBINATIONS, Expressions
from tests.support.emulator.nodes import (
    CUBE_SCOPES,
    PARALLEL,
    PRIVATE_SCOPES,
    THREAD_BINDING,
    Unsupported,
    block_facts,
    c_type,
    is_vector_core_loop,
    kind_of,
    op_of,
    uses_threads,
    uses_vector_cores,
)

COPIES = ("copy", "async_copy", "tma_copy", "ascend_copy")
PRODUCTS = ("gemm", "wgmma_gemm", "tcgen05_gemm")
# What orders or times the hardware and changes no value here, where every operator ends before the next one.
NO_EFFECT = frozenset(
    """assume ptx_wait_group ptx_commit_group pdl_sync pdl_trigger set_max_nreg no_set_max_nreg
    annotate_producer_reg_dealloc annotate_consumer_reg_alloc fence_proxy_async wait_wgmma warpgroup_wait
    warpgroup_arrive warpgroup_commit_batch warpgroup_fence_operand use_swizzle deallocate_tmem
    tcgen05_before_thread_sync tcgen05_after_thread_sync tma_store_arrive tma_store_wait""".split()
)


class Statements(Expressions):
    """Prints statements into `lines`."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._is_ascend = uses_vector_cores(program.body)
        self._has_threads = self._is_ascend or uses_threads(program.body)
        self._threads = (1, 1, 1)
        self._reducers: dict[Any, str] = {}
        self._parallel_depth = 0
        self._thread_variables: set[Any] = set()
        self._group: tuple[int, int] | None = None  # first thread and number of those that come here

    def write(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    @contextmanager
    def braces(self, head: str = "", tail: str = "") -> Iterator[None]:
        """`head { ... } tail` around what is printed inside."""
        self.write(f"{head} {{")
        yield
        self.write(f"}} {tail}")

    @contextmanager
    def together(self, *buffers: Any) -> Iterator[None]:
        """What all threads of a block do together, unless it concerns a thread's own memory."""
        is_private = any(self._is_private(b) for b in buffers) or (self._is_ascend and not buffers)
        if not self._has_threads or self._parallel_depth > 0 or is_private:
            yield
            return
        first, _ = self._group or (0, 0)
        barrier = "sync_block();" if self._group is None else "sync_group({}, {});".format(*self._group)
        self.write(barrier)
        with self.braces(f"if (is_leader({first}))"):
            yield
        self.write(barrier)

    def _is_private(self, buffer: Any) -> bool:
        """Whether every thread has memory of its own for a buffer."""
        if self._is_ascend:
            return buffer.scope() not in (*CUBE_SCOPES, "global")
        return buffer.scope() in PRIVATE_SCOPES

    @contextmanager
    def branch(self, group: tuple[int, int] | None) -> Iterator[None]:
        """Only the threads of `group` come to what is printed inside; None: all that came so far."""
        before, self._group = self._group, group or self._group
        yield
        self._group = before

    def groups(self, condition: Any) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """The groups that `thread < n` makes for its branches, first thread and number; None elsewhere."""
        if kind_of(condition) != "LT" or condition.a not in self._thread_variables:
            return None, None
        if kind_of(condition.b) != "IntImm":
            return None, None
        x, y, z = self._threads
        first, count = self._group or (0, x * y * z)
        bound = int(condition.b)
        if (y, z) != (1, 1) or not first < bound < first + count:
            return None, None
        return (first, bound - first), (bound, first + count - bound)

    def statement(self, s: Any) -> None:
        """Print a statement.

        Raises:
            Unsupported: it contains something that the emulator does not know.
        """
        kind = kind_of(s)
        if kind == "SeqStmt":
            for part in s.seq:
                self.statement(part)
        elif kind == "SBlockRealize":
            self.statement(s.block)
        elif kind == "SBlock":
            with self.braces():
                if s.init is not None:
                    self.statement(s.init)
                self.statement(s.body)
        elif kind == "AttrStmt":
            if "warp_specialize" in s.attr_key:
                raise Unsupported("warp-specialised code")
            self.statement(s.body)
        elif kind == "Bind":
            self._bind(s)
        elif kind == "For":
            self._loop(s)
        elif kind == "While":
            with self.braces(f"while ({self.expression(s.condition)})"):
                self.statement(s.body)
        elif kind == "IfThenElse":
            then_group, else_group = self.groups(s.condition)
            with self.braces(f"if ({self.expression(s.condition)})"), self.branch(then_group):
                self.statement(s.then_case)
            if s.else_case is not None:
                with self.braces("else"), self.branch(else_group):
                    self.statement(s.else_case)
        elif kind == "BufferStore":
            self._store(s)
        elif kind == "Evaluate":
            if kind_of(s.value) == "Call":
                self._operator(s.value)
        elif kind == "AssertStmt":
            self.write(f'if (!({self.expression(s.condition)})) fail("assertion of the program");')
        elif kind not in ("DeclBuffer", "AllocBuffer"):  # what they declare is known from the buffer itself
            raise Unsupported(f"statement {kind}")

    def _bind(self, s: Any) -> None:
        if kind_of(s.value) == "Call" and op_of(s.value) == "launch_thread_idx":
            if int(s.value.args[0]) == 0:
                self._thread_variables.add(s.var)
            self.write(f"[[maybe_unused]] const int32_t {self.name(s.var)} = {self._thread_index(s.value)};")
        elif str(s.var.dtype).startswith("handle"):
            raise Unsupported("pointers")
        else:
            self.write(f"const {c_type(s.var.dtype)} {self.name(s.var)} = {self.expression(s.value)};")

    def _thread_index(self, call: Any) -> str:
        """Index of the running thread along x, y or z."""
        if not self._has_threads:
            return "0"
        x, y, _ = self._threads
        return ("thread() % {x}", "thread() / {x} % {y}", "thread() / ({x} * {y})")[int(call.args[0])].format(
            x=x, y=y
        )

    def _store(self, s: Any) -> None:
        kind = c_type(s.buffer.dtype)
        with self.together(*([s.buffer] if s.buffer.scope() == "local.fragment" else [_PRIVATE])):
            where = f"{self.name(s.buffer.data)}, {self.position(s.buffer, s.indices)}"
            self.write(f"store<{kind}>({where}, cast<{kind}>({self.expression(s.value)}));")

    def _loop(self, s: Any) -> None:
        kind = int(s.kind)
        if kind == THREAD_BINDING:
            if not str(s.thread_binding.thread_tag).startswith("blockIdx"):
                raise Unsupported(f"loop over {s.thread_binding.thread_tag}")
            self._count(s)
            with self.braces():
                self._loop_variable(s, is_parallel=True)
                is_inner = kind_of(s.body) == "For" and int(s.body.kind) == THREAD_BINDING
                if is_inner and not is_vector_core_loop(s.body):
                    self.statement(s.body)
                else:
                    self._block(s.body)
        elif kind == PARALLEL:
            with self.together():
                self._parallel_depth += 1
                self._count(s)
                with self.braces():
                    self._loop_variable(s, is_parallel=True)
                    self.statement(s.body)
                self._parallel_depth -= 1
        else:
            self._count(s)
            with self.braces():
                self._loop_variable(s, is_parallel=False)
                self.statement(s.body)

    def _count(self, s: Any) -> None:
        """Head of a loop over 0..extent-1 in a variable of its own."""
        turn = f"turn_{self.name(s.loop_var)}"
        start = f"int64_t {turn} = 0, size_{turn} = {self.expression(s.extent)}"
        self.write(f"for ({start}; {turn} < size_{turn}; ++{turn})")

    def _loop_variable(self, s: Any, *, is_parallel: bool) -> None:
        turn, kind = f"turn_{self.name(s.loop_var)}", c_type(s.loop_var.dtype)
        at = f"(run.reverse ? size_{turn} - 1 - {turn} : {turn})" if is_parallel else turn
        step = "" if s.step is None else f" * {self.expression(s.step)}"
        value = f"{kind}({self.expression(s.min)} + {at}{step})"
        self.write(f"[[maybe_unused]] const {kind} {self.name(s.loop_var)} = {value};")

    def _block(self, body: Any) -> None:
        """One block of threads: its memory, then what it does."""
        buffers, self._threads, self._reducers = block_facts(body)
        if is_vector_core_loop(body):
            self._threads = int(body.extent), 1, 1
        x, y, z = self._threads
        shared = [b for b in buffers if not self._is_private(b)]
        private = [b for b in buffers if self._is_private(b)]
        for buffer in shared:
            self._allocate(buffer)
        head = f"run_block({x * y * z}, [&]" if self._has_threads else "([&]"
        with self.braces(head, ");" if self._has_threads else ")();"):
            for buffer in private:
                self._allocate(buffer)
            if is_vector_core_loop(body):
                self.write(f"const int32_t {self.name(body.loop_var)} = thread();")
                body = body.body
            self.statement(body)

    def _allocate(self, buffer: Any) -> None:
        count = " * ".join(self.sizes(buffer)) or "1"
        if "barrier" in buffer.scope():
            self.write(f"[[maybe_unused]] Phases {self.name(buffer.data)}({count});")
            return
        size = f"({count} * bits_of<{c_type(buffer.dtype)}> + 7) / 8"
        self.write(f'[[maybe_unused]] Scratch {self.name(buffer.data)}("{buffer.name}", {size});')

    # -- tile operators

    def region(self, call: Any, split_axis: int | None = None) -> tuple[Any, str]:
        """Buffer of a `T.region`, and the runtime's `Region`; with a `split_axis` a thread's share of it."""
        if op_of(call) != "region":
            raise Unsupported(f"{op_of(call)} where a region is expected")
        first, _access, *extents = call.args
        buffer = first.buffer
        parts = [
            [self.expression(base), self.expression(extent)] for base, extent in zip(first.indices, extents)
        ]
        if split_axis is not None:
            base, extent = parts[split_axis]
            share = f"int64_t({extent}) / {self._threads[0]}"
            parts[split_axis] = [f"int64_t({base}) + thread() * ({share})", share]
        axes = ", ".join(
            f"{{int64_t({base}), int64_t({extent}), {size}, {stride}, "
            f"{'false' if _is_one(whole) else 'true'}}}"
            for (base, extent), whole, size, stride in zip(
                parts, extents, self.sizes(buffer), self.strides(buffer), strict=True
            )
        )
        return buffer, f"Region{{{self.name(buffer.data)}, {len(extents)}, {{{axes}}}}}"

    def _operator(self, e: Any) -> None:
        """A call that stands as a statement."""
        op, args = op_of(e), list(e.args)
        if op in NO_EFFECT:
            return
        if op in COPIES:
            self._copy(args[0], args[1], e.annotations)
        elif op == "fill":
            self._fill(args[0], args[1])
        elif op in PRODUCTS:
            self._gemm(args)
        elif op == "reduce":
            self._reduce(args)
        elif op in ("cumsum", "cummax"):
            self._two_regions(
                f"scan<{'Sum' if op == 'cumsum' else 'Max'}, {{to}}>", args, ", {}, {}", args[2:]
            )
        elif op == "transpose":
            self._two_regions("transpose<{to}>", args)
        elif op in ("atomicadd", "atomicmax", "atomicmin"):
            self._two_regions(
                f"accumulate<{COMBINATIONS[op.removeprefix('atomic')]}, {{to}}, {{from_}}>", args
            )
        elif op == "reducer_init":
            self._reducer_init(args)
        elif op == "reducer_update":
            self._reducer_update(args)
        elif op.startswith("finalize_reducer"):
            if len(args) > 1:
                self._copy(args[0], args[1], {})
        elif op in ("tvm_storage_sync", "sync_threads"):
            named = [self.expression(a) for a in args[1:]]  # a barrier's number and how many threads it joins
            self.write(f"sync_named({', '.join(named)});" if len(named) == 2 else "sync_block();")
        elif op == "mbarrier_wait_parity":
            self.write(f"wait_phase({self._barrier(args[0])}, {self.expression(args[1])});")
        elif op == "named_barrier_arrive":
            self.write(f"arrive_named({self.expression(args[0])}, {self.expression(args[1])});")
        elif op == "sync_warp":
            self.write("sync_warp();")
        elif op == "thread_return":
            self.write("return;")
        elif op == "loop_break":
            self.write("break;")
        elif op in ("continue_loop", "loop_continue"):
            self.write("continue;")
        elif op.startswith("device_assert"):
            self.write(f'if (!({self.expression(args[0])})) fail("device_assert of the program");')
        else:
            self.write(f"{self.call(e)};")

    def _two_regions(self, function: str, args: list[Any], tail: str = "", more: Any = ()) -> None:
        (source, from_), (target, to) = self.region(args[0]), self.region(args[1])
        name = function.format(to=c_type(target.dtype), from_=c_type(source.dtype))
        with self.together(source, target):
            self.write(f"{name}({from_}, {to}{tail.format(*(self.expression(m) for m in more))});")

    def _copy(self, from_: Any, to: Any, annotations: Any) -> None:
        if any("gather4" in key or "scatter4" in key for key in annotations or ()):
            raise Unsupported("gather of four rows")
        ranks = [sum(not _is_one(extent) for extent in r.args[2:]) for r in (from_, to)]
        if ranks[0] != ranks[1]:
            raise Unsupported("copy between regions of different rank")
        barrier = (annotations or {}).get("barrier")
        if barrier is not None:  # this copy completes it, which takes no other arrival
            if int(annotations.get("emit_arrive", 0)) != 1:
                raise Unsupported("copy at whose barrier others arrive")
            (source, whole), (target, part) = self.region(from_), self.region(to)
            with self.together(source, target):
                self.write(f"copy<{c_type(target.dtype)}, {c_type(source.dtype)}>({whole}, {part});")
                self.write(
                    f"++{self.name(barrier.buffer.data)}.completed[{self.expression(barrier.indices[0])}];"
                )
            return
        split = int((annotations or {}).get("dual_dst_ctl", 0))  # 1: rows, 2: columns, to either vector core
        if split == 0:
            self._two_regions("copy<{to}, {from_}>", [from_, to])
        else:
            (source, part), (target, whole) = self.region(from_, split - 3), self.region(to)
            self.write(f"copy<{c_type(target.dtype)}, {c_type(source.dtype)}>({part}, {whole});")

    def _barrier(self, load: Any) -> str:
        return f"{self.name(load.buffer.data)}, {self.expression(load.indices[0])}"

    def _fill(self, region: Any, value: Any) -> None:
        buffer, text = self.region(region)
        kind = c_type(buffer.dtype)
        with self.together(buffer):
            self.write(f"fill<{kind}>({text}, cast<{kind}>({self.expression(value)}));")

    def _gemm(self, args: list[Any]) -> None:
        (a, left), (b, right), (c, result) = (self.region(r) for r in args[:3])
        flags = [str(bool(int(t))).lower() for t in args[3:5]]
        m, n, k = (int(x) for x in args[5:8])
        types = ", ".join(c_type(x.dtype) for x in (c, a, b))
        clear, flushes = self.expression(args[9]), str(not self._is_ascend).lower()
        sizes = f"{', '.join(flags)}, {m}, {n}, {k}, {clear}, {flushes}"
        with self.together(a, b, c):
            self.write(f"gemm<{types}>({left}, {right}, {result}, {sizes});")

    def _reduce(self, args: list[Any]) -> None:
        (source, from_), (target, to) = self.region(args[0]), self.region(args[1])
        operation = str(args[2].value)
        of_magnitudes = operation.startswith("abs")
        name = COMBINATIONS[operation.removeprefix("abs")]
        types = f"{name}, {c_type(target.dtype)}, {c_type(source.dtype)}"
        flags = f"{self.expression(args[4])}, {str(of_magnitudes).lower()}"
        with self.together(source, target):
            self.write(f"reduce<{types}>({from_}, {to}, {int(args[3])}, {flags});")

    def _reducer_init(self, args: list[Any]) -> None:
        buffer, text = self.region(args[0])
        kind, operation = c_type(buffer.dtype), COMBINATIONS[self._reducers.get(buffer.data, "sum")]
        start = self.expression(args[1]) if len(args) > 1 else f"{operation}::start<Wide<{kind}>>()"
        with self.together(buffer):
            self.write(f"fill<{kind}>({text}, cast<{kind}>({start}));")

    def _reducer_update(self, args: list[Any]) -> None:
        target, value = args
        kind, operation = (
            c_type(target.buffer.dtype),
            COMBINATIONS[self._reducers.get(target.buffer.data, "sum")],
        )
        where = f"{self.name(target.buffer.data)}, {self.position(target.buffer, target.indices)}"
        self.write(f"exchange<{operation}, {kind}>({where}, cast<{kind}>({self.expression(value)}));")


class _Private:
    @staticmethod
    def scope() -> str:
        return PRIVATE_SCOPES[0]


_PRIVATE = _Private()  # stands for "not done together"


def _is_one(extent: Any) -> bool:
    return extent == 1 if isinstance(extent, int) else kind_of(extent) == "IntImm" and int(extent.value) == 1
