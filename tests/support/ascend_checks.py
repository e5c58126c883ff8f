"""Lower programs for Ascend 950, as far as its compiler's door: AscendC source, and what the program needs.

The device compiler is not part of TileLang. What was lowered is remembered by its source files and by the
traced program.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.build_cache import fingerprint, remembered, write_whole
from tilelang_ops.common.kernels import ASCEND_TARGET, Program, compiler_target

UNIFIED_BUFFER = 248 << 10  # bytes of a vector core
UNIFIED_BUFFER_SIMT = 216 << 10  # what a program with a SIMT section may use of them
L0C = 256 << 10  # bytes of accumulators of a cube core
# Bytes of a cube core's other memory.
CUBE_MEMORY = {"shared.l1": 512 << 10, "shared.l0a": 64 << 10, "shared.l0b": 64 << 10}


@dataclass(frozen=True)
class AscendReport:
    """What the lowered program needs.

    Attributes:
        unified_buffer_bytes: of a vector core.
        accumulator_bytes: of a cube core.
        cube_bytes: what the program declares in a cube core's other memory, each version of a buffer counted.
        is_simt: it has a SIMT section.
        is_cube: it has matrix products.
    """

    unified_buffer_bytes: int
    accumulator_bytes: int
    cube_bytes: dict[str, int]
    is_simt: bool
    is_cube: bool


def check(report: AscendReport, *, uses_cube: bool) -> None:
    """Assert that a program fits, and that it multiplies on the cube cores where it should."""
    limit = UNIFIED_BUFFER_SIMT if report.is_simt else UNIFIED_BUFFER
    assert report.unified_buffer_bytes <= limit, report
    assert report.accumulator_bytes <= L0C, report
    assert all(report.cube_bytes[scope] <= size for scope, size in CUBE_MEMORY.items()), report
    assert report.is_cube or not uses_cube, report


def lower(program: Program) -> AscendReport:
    """The report of a program, from the cache or lowered now; raises what TileLang raises."""
    by_files = remembered("ascend", _version(), program.file_name(ASCEND_TARGET))
    if by_files.exists():
        return AscendReport(**json.loads(by_files.read_text()))
    traced = program.trace(ASCEND_TARGET)
    by_program = remembered("ascend", _version(), fingerprint(program, traced))
    if not by_program.exists():
        write_whole(by_program, json.dumps(asdict(_lower(program, traced))))
    write_whole(by_files, by_program.read_text())
    return AscendReport(**json.loads(by_program.read_text()))


@cache
def _version() -> str:
    import tilelang

    return f"{tilelang.__version__}|{Path(__file__).read_text()}"


def _lower(program: Program, traced: Any) -> AscendReport:
    import tilelang
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm.target import Target

    target = Target(compiler_target(ASCEND_TARGET))
    configs = normalize_pass_configs(dict(program.factory.pass_configs))
    with tilelang.transform.PassContext(opt_level=3, config=configs), target:
        artifact = tilelang.lower(traced, target=target)
    source = str(artifact.kernel_source)
    sizes = [
        int(re.sub(r"\D", "", str(function.attrs["dyn_shared_memory_buf"]).replace("int64", "")) or 0)
        for function in artifact.device_mod.functions.values()
        if function.attrs and "dyn_shared_memory_buf" in function.attrs
    ]
    declared = _declared_bytes(traced)
    return AscendReport(
        unified_buffer_bytes=max(sizes, default=0),
        accumulator_bytes=declared["shared.l0c"],
        cube_bytes={scope: declared[scope] for scope in CUBE_MEMORY},
        is_simt="__simt_vf__" in source,
        is_cube="ascend_gemm" in source or "asc_mmad" in source,
    )


def _declared_bytes(program: Any) -> Counter[str]:
    """Bytes of a traced program's buffers by scope, of as many versions as it asks for."""
    from tvm import DataType
    from tvm.tirx.stmt_functor import post_order_visit

    buffers, versions = {}, {}

    def look(node: Any) -> None:
        if type(node).__name__ == "SBlock":
            buffers.update((buffer.data, buffer) for buffer in node.alloc_buffers)
            versions.update(node.annotations.get("tl.buffer_versions_map", {}))

    post_order_visit(program.body, look)
    total: Counter[str] = Counter()
    for data, buffer in buffers.items():
        elements = math.prod(int(size) for size in buffer.shape)
        total[buffer.scope()] += int(versions.get(data, 1)) * elements * DataType(buffer.dtype).bits // 8
    return total
