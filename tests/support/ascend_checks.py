"""Lower programs for Ascend 950, as far as its compiler's door: AscendC source, and what the program needs.

The device compiler is not part of TileLang. What was lowered is remembered by a hash of the sources.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.support.build_cache import build_cache, write_whole
from tilelang_ops.common.kernels import ASCEND_TARGET, Program, compiler_target

UNIFIED_BUFFER = 248 << 10  # bytes of a vector core
UNIFIED_BUFFER_SIMT = 216 << 10  # what a program with a SIMT section may use of them
L0C = 256 << 10  # bytes of accumulators of a cube core


@dataclass(frozen=True)
class AscendReport:
    """What the lowered program needs.

    Attributes:
        unified_buffer_bytes: of a vector core.
        accumulator_bytes: of a cube core.
        is_simt: it has a SIMT section.
        is_cube: it has matrix products.
    """

    unified_buffer_bytes: int
    accumulator_bytes: int
    is_simt: bool
    is_cube: bool


def check(report: AscendReport, *, uses_cube: bool) -> None:
    """Assert that a program fits, and that it multiplies on the cube cores where it should."""
    limit = UNIFIED_BUFFER_SIMT if report.is_simt else UNIFIED_BUFFER
    assert report.unified_buffer_bytes <= limit, report
    assert report.accumulator_bytes <= L0C, report
    assert report.is_cube or not uses_cube, report


def lower(program: Program) -> AscendReport:
    """The report of a program, from the cache or lowered now; raises what TileLang raises."""
    key = hashlib.sha256(f"{_version()}|{program.file_name(ASCEND_TARGET)}".encode()).hexdigest()[:32]
    path = build_cache("ascend") / f"{key}.json"
    if path.exists():
        return AscendReport(**json.loads(path.read_text()))
    report = _lower(program)
    write_whole(path, json.dumps(asdict(report)))
    return report


@cache
def _version() -> str:
    import tilelang

    return f"{tilelang.__version__}|{Path(__file__).read_text()}"


def _lower(program: Program) -> AscendReport:
    import tilelang
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm.target import Target

    target = Target(compiler_target(ASCEND_TARGET))
    configs = normalize_pass_configs(dict(program.factory.pass_configs))
    with tilelang.transform.PassContext(opt_level=3, config=configs), target:
        artifact = tilelang.lower(program.trace(ASCEND_TARGET), target=target)
    source = str(artifact.kernel_source)
    sizes = [
        int(re.sub(r"\D", "", str(function.attrs["dyn_shared_memory_buf"]).replace("int64", "")) or 0)
        for function in artifact.device_mod.functions.values()
        if function.attrs and "dyn_shared_memory_buf" in function.attrs
    ]
    accumulators = re.findall(r"__cc__\s+(float|int32_t)\s+\w+\[(\d+)\]", source)
    return AscendReport(
        unified_buffer_bytes=max(sizes, default=0),
        accumulator_bytes=sum(4 * int(count) for _, count in accumulators),
        is_simt="__simt_vf__" in source,
        is_cube="ascend_gemm" in source or "Mmad" in source,
    )
