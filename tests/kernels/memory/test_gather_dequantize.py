"""gather_dequantize's kernels: every bit of the reference, and tables in pinned host memory."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.host_memory import device_view
from tilelang_ops.memory import gather_dequantize
from tilelang_ops.memory.gather_dequantize import cuda, reference

ROWS, WIDTH = 37, 256


def quantised_table() -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite code and many scales, those of subnormal and of the largest values too."""
    codes = torch.randint(0, 256, (ROWS, WIDTH)).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN has more than one pattern
    scales = torch.randint(100, 140, (ROWS, WIDTH // 32)).to(torch.uint8)
    scales[0], scales[1] = 1, 240
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_rows(run_kernel: KernelRunner, dtype: torch.dtype) -> None:
    codes, scales = quantised_table()
    for shape in ((1,), (3, 24), (11,)):
        index = torch.randint(0, ROWS, shape, dtype=torch.int32)
        index.view(-1)[0] = ROWS - 1
        out, _ = run_kernel.contracting()(cuda, codes, scales, index, dtype)
        assert_same_bits(out, reference.run(codes, scales, index, dtype), f"{shape}")


@pytest.mark.parametrize(
    ("source", "dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
)
def test_plain_rows(run_kernel: KernelRunner, source: torch.dtype, dtype: torch.dtype) -> None:
    table = torch.randn(ROWS, 30).to(source)
    index = torch.randint(0, ROWS, (2, 5), dtype=torch.int32)
    out, _ = run_kernel(cuda, table, None, index, dtype)
    assert_same_bits(out, reference.run(table, None, index, dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads host memory from a GPU")
def test_table_in_pinned_host_memory_cuda() -> None:
    codes, scales = (part.pin_memory() for part in quantised_table())
    index = torch.randint(0, ROWS, (5, 24), dtype=torch.int32)
    expected = reference.run(codes, scales, index, torch.bfloat16)
    out = gather_dequantize(codes, scales, index.cuda(), torch.bfloat16)
    assert_same_bits(out.cpu(), expected)
    codes.fill_(0x38)  # 1.0: the kernel reads the memory itself, not a copy
    scales.fill_(127)
    assert gather_dequantize(codes, scales, index.cuda(), torch.bfloat16).eq(1).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads host memory from a GPU")
def test_memory_that_is_not_pinned_is_refused_cuda() -> None:
    with pytest.raises(ValueError, match="pinned"):
        device_view(torch.zeros(1 << 16, dtype=torch.uint8), torch.device("cuda", 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the memory of a GPU")
def test_rows_behind_four_gigabytes_cuda() -> None:
    rows = (5 << 30) // WIDTH
    codes = torch.zeros(rows, WIDTH, dtype=torch.uint8, device="cuda")
    scales = torch.full((rows, WIDTH // 32), 127, dtype=torch.uint8, device="cuda")
    codes[-1] = 0x38
    index = torch.tensor([rows - 1, rows // 2, 0], dtype=torch.int32, device="cuda")
    out = gather_dequantize(codes, scales, index, torch.float32)
    assert out.sum(1).tolist() == [WIDTH, 0, 0]
