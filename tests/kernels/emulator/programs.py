"""Small TileLang programs that the tests of the emulator run."""

import tilelang.language as T


def cast(source: str, result: str):
    """out[i] = x[i] in another type."""
    n = T.dynamic("n")

    @T.prim_func
    def program(x: T.Tensor((n,), source), out: T.Tensor((n,), result)):
        with T.Kernel(n, threads=32) as i:
            out[i] = T.cast(x[i], result)

    return program


def gemm(
    m: int, n: int, k: int, operands: str, result: str, transpose_a: bool, transpose_b: bool, clear: bool
):
    """out = a b, or a b + out."""
    a_shape = (k, m) if transpose_a else (m, k)
    b_shape = (n, k) if transpose_b else (k, n)

    @T.prim_func
    def program(
        a: T.Tensor(a_shape, operands), b: T.Tensor(b_shape, operands), out: T.Tensor((m, n), result)
    ):
        with T.Kernel(1, threads=128):
            a_tile = T.alloc_shared(a_shape, operands)
            b_tile = T.alloc_shared(b_shape, operands)
            sums = T.alloc_fragment((m, n), result)
            T.copy(a, a_tile)
            T.copy(b, b_tile)
            T.copy(out, sums)
            T.gemm(a_tile, b_tile, sums, transpose_a, transpose_b, clear_accum=clear)
            T.copy(sums, out)

    return program


def reduce(rows: int, columns: int, dtype: str, kinds: tuple[str, ...], axis: int, clear: bool):
    """out[k] = a reduction of x along one axis, joined with out[k] unless `clear`."""
    kept = columns if axis == 0 else rows

    @T.prim_func
    def program(x: T.Tensor((rows, columns), dtype), out: T.Tensor((len(kinds), kept), dtype)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((rows, columns), dtype)
            result = T.alloc_fragment((kept,), dtype)
            T.copy(x, tile)
            for k, kind in enumerate(kinds):
                T.copy(out[k, :], result)
                T.reduce(tile, result, kind, axis, clear)
                T.copy(result, out[k, :])

    return program


def scan(rows: int, columns: int, reverse: bool):
    """Running sums along the last axis."""

    @T.prim_func
    def program(x: T.Tensor((rows, columns), "int32"), out: T.Tensor((rows, columns), "int32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((rows, columns), "int32")
            T.copy(x, tile)
            T.cumsum(tile, dim=1, reverse=reverse)
            T.copy(tile, out)

    return program


def warp_sums(threads: int):
    """Sums over each warp by shuffles, in threads' own variables."""

    @T.prim_func
    def program(x: T.Tensor((threads,), "float32"), out: T.Tensor((threads // 32,), "float32")):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            total = T.alloc_var("float32")
            total = x[thread]
            for step in T.serial(5):
                total = total + T.shfl_xor(total, 16 >> step)
            if thread % 32 == 0:
                out[thread // 32] = total

    return program


def exchange(threads: int, has_barrier: bool):
    """out[i] = x[threads - 1 - i] by way of shared memory; wrong without the barrier."""

    @T.prim_func
    def program(x: T.Tensor((threads,), "int32"), out: T.Tensor((threads,), "int32")):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            shared = T.alloc_shared((threads,), "int32")
            shared[thread] = x[thread]
            if has_barrier:
                T.sync_threads()
            out[thread] = shared[threads - 1 - thread]

    return program


def relay(arrives: bool):
    """out[i] = x[i] with its bytes reversed, by a warp that comes to a named barrier and goes on."""

    @T.prim_func
    def program(x: T.Tensor((32,), "uint32"), out: T.Tensor((32,), "uint32")):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            shared = T.alloc_shared((32,), "uint32")
            if thread < 32:
                shared[thread] = T.call_extern(
                    "uint32", "__byte_perm", x[thread], T.uint32(0), T.uint32(0x0123)
                )
                if arrives:
                    T.named_barrier_arrive(1, 64)
            else:
                T.sync_threads(1, 64)
                out[thread - 32] = shared[thread - 32]

    return program


def awaited_copies(copies: int, waits: int):
    """out = x by a warp that waits at a barrier for what another has copied."""
    from tilelang.cuda import language as TC

    @T.prim_func
    def program(x: T.Tensor((32,), "float32"), out: T.Tensor((32,), "float32")):
        with TC.Kernel(1, threads=64):
            thread = TC.get_thread_binding()
            shared = TC.alloc_shared((32,), "float32")
            copied = TC.alloc_barrier(1)
            if thread < 32:
                for _ in TC.serial(copies):
                    TC.tma_copy(x, shared, barrier=copied, annotations={"emit_arrive": 1})
            else:
                for wait in TC.serial(waits):
                    TC.mbarrier_wait_parity(copied, wait % 2)
                out[thread - 32] = shared[thread - 32]

    return program


def votes(threads: int):
    """ballot[w] of odd values, and their number in the block."""

    @T.prim_func
    def program(
        x: T.Tensor((threads,), "int32"),
        ballot: T.Tensor((threads // 32,), "int64"),
        count: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            ballot[thread // 32] = T.cast(T.ballot(x[thread] % 2), "int64")
            total = T.syncthreads_count(x[thread] % 2)
            if thread == 0:
                count[0] = total

    return program


def diverging(threads: int):
    """Half of the threads wait for the block, the others never come."""

    @T.prim_func
    def program(out: T.Tensor((threads,), "int32")):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            if thread < threads // 2:
                T.sync_threads()
            else:
                out[thread] = T.shfl_xor(thread, 1) + T.shfl_xor(thread, 2)
            if thread % 32 < 16:
                T.sync_warp()
            else:
                T.sync_threads()

    return program


def race():
    """Every parallel iteration writes the same element: the last one wins."""

    @T.prim_func
    def program(x: T.Tensor((8,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                out[0] = x[i]

    return program


def shifted(offset: int):
    """out[i] = x[i + offset], outside the tensor at an end."""
    n = T.dynamic("n")

    @T.prim_func
    def program(x: T.Tensor((n,), "float32"), out: T.Tensor((n,), "float32")):
        with T.Kernel(n, threads=32) as i:
            out[i] = x[i + offset]

    return program


def tail(block: int):
    """A copy by tiles; the last one hangs over the end."""
    n = T.dynamic("n")

    @T.prim_func
    def program(x: T.Tensor((n,), "float32"), out: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=32) as i:
            tile = T.alloc_shared((block,), "float32")
            T.copy(x[i * block], tile)
            T.copy(tile, out[i * block])

    return program


def half_filled(reads_all: bool):
    """Writes half of a shared tile, copies it to a fragment, and reads half or all of that."""

    @T.prim_func
    def program(x: T.Tensor((8,), "float32"), out: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            shared = T.alloc_shared((8,), "float32")
            own = T.alloc_fragment((8,), "float32")
            for i in T.Parallel(4):
                shared[i] = x[i]
            T.copy(shared, own)
            for i in T.Parallel(8):
                if reads_all or i < 4:
                    out[i] = own[i] * 2.0

    return program


def scratch_overrun():
    """Writes one element too many into shared memory."""

    @T.prim_func
    def program(x: T.Tensor((9,), "float32"), out: T.Tensor((9,), "float32")):
        with T.Kernel(1, threads=32):
            shared = T.alloc_shared((8,), "float32")
            for i in T.serial(9):
                shared[i] = x[i]
                out[i] = shared[i]

    return program


def large_index():
    """An index that leaves 32 bits."""
    n = T.dynamic("n")

    @T.prim_func
    def program(x: T.Tensor((n,), "int32"), out: T.Tensor((n,), "int64")):
        with T.Kernel(n, threads=32) as i:
            out[i] = T.cast(x[i] * 65536, "int64")

    return program


def multiply_add():
    """a b + c, with the product rounded where the compiler likes, and rounded always."""
    n = T.dynamic("n")

    @T.prim_func
    def program(
        a: T.Tensor((n,), "float32"),
        b: T.Tensor((n,), "float32"),
        c: T.Tensor((n,), "float32"),
        plain: T.Tensor((n,), "float32"),
        exact: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(n, threads=32) as i:
            plain[i] = a[i] * b[i] + c[i]
            exact[i] = T.ieee_mul(a[i], b[i]) + c[i]

    return program


def counters():
    """Counts the values of x that lie in each of four bins, atomically."""
    n = T.dynamic("n")

    @T.prim_func
    def program(x: T.Tensor((n,), "int32"), counts: T.Tensor((4,), "int32")):
        with T.Kernel(n, threads=32) as i:
            for _ in T.Parallel(1):
                T.atomic_add(counts[x[i] % 4], 1)

    return program


def packed_nibbles():
    """Adds one half to E2M1 values, two to a byte."""
    n = T.dynamic("n")

    @T.prim_func
    def program(x: T.Tensor((n,), "float4_e2m1fn"), out: T.Tensor((n,), "float32")):
        with T.Kernel(n, threads=32) as i:
            out[i] = T.cast(x[i], "float32") + 0.5

    return program
