"""The cases of the kernel table at small sizes: the operator and the work in torch against its meaning."""

from __future__ import annotations

import importlib
import io
import json
from typing import Any

import pytest

from examples import benchmark_kernels
from examples.kernel_cases.case import Case


def _cases(family: str, small: bool) -> list[Case]:
    return importlib.import_module(f"examples.kernel_cases.{family}").cases(small)


@pytest.mark.parametrize("family", benchmark_kernels.MODULES)
def test_both_sides_pass_their_checks(family: str) -> None:
    for case in _cases(family, small=True):
        try:
            case.try_run("cpu")
            case.try_torch("cpu")
        except Exception as error:
            raise AssertionError(f"{case.op}, {case.size}") from error


@pytest.mark.parametrize("family", benchmark_kernels.MODULES)
def test_small_cases_are_of_every_operator(family: str) -> None:
    large, small = ({case.op for case in _cases(family, small=size)} for size in (False, True))
    assert large == small


def test_a_failing_case_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One check fails, one case ends its process with a word and one without: all others are timed."""
    fates = {1: "AssertionError", 3: "OutOfMemoryError", 4: None}
    cases = _cases("norm", small=False) + _cases("memory", small=False)

    class Worker:
        def __init__(self, command: list[str], **options: Any) -> None:
            lines = []
            for number in range(int(command[command.index("--skip") + 1]), len(cases)):
                fate = fates.get(number, "")
                if fate is None:
                    break
                result = {"op": cases[number].op, "size": cases[number].size, "bytes": 0, "flops": 0}
                result |= {"roofline_us": 1.0, "us": None if fate else 2.0, "share": 0.5, "torch_us": 3.0}
                lines.append(json.dumps(result | {"torch_waits": number == 7, "error": fate}))
                if fate == "OutOfMemoryError":
                    break
            self.stdout = io.StringIO("\n".join(lines))

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(benchmark_kernels.subprocess, "Popen", Worker)
    monkeypatch.setattr("sys.argv", ["benchmark_kernels", "--families", "norm", "memory"])
    with pytest.raises(SystemExit) as ended:
        benchmark_kernels.main()
    assert ended.value.code == len(fates)
    out, err = capsys.readouterr()
    timed = [case for number, case in enumerate(cases) if number not in fates]
    rows = out.splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == [case.size for case in timed]
    assert [row for row in rows if "3.0*" in row] == [rows[4]]
    for number in fates:
        assert f"{cases[number].op}, {cases[number].size}: " in err
