"""The README's promises: its program runs, its links lead somewhere, the example answers."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable

import pytest

from tests.support.paths import ROOT, TINY_QUANT
from tests.support.process import clean_env, run

README = (ROOT / "README.md").read_text()


def test_the_program_runs_and_is_short():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(program.splitlines()) <= 20
    result = run([sys.executable, "-c", program], env=clean_env(PYTHONPATH=str(ROOT)))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "Paris" in lines[0]
    assert sum(line.startswith(("stop ", "length ")) for line in lines) == 4, "2 prompts, 2 completions each"
    assert any(line.startswith("In the beginning") for line in lines)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_the_example_answers_its_own_prompts():
    command = [sys.executable, "examples/offline_inference.py"]
    result = run(command, env=clean_env(PYTHONPATH=str(ROOT)))
    assert result.returncode == 0, result.stderr
    capital, story, total, json_answer = result.stdout.split("\n> ")[1:]
    assert "Paris" in capital
    assert "[stop, " in capital
    assert "fox" in story
    assert len(story.split()) > 30
    assert "19" in total.splitlines()[1]
    assert '"Anna"' in json_answer
    assert re.search(r"4 prompts, \d+ tokens in [\d.]+ s: [\d.]+ tokens/s\n$", result.stdout)


@pytest.fixture
def example(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls the example's `main` in this process; returns exit status, output and errors."""
    spec = importlib.util.spec_from_file_location("offline_inference", ROOT / "examples/offline_inference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = module.main(list(arguments))
        return status, *capfd.readouterr()

    return call


def test_the_example_continues_text_and_repeats_a_seed(example):
    arguments = ("--no-chat", "--prompt", "Once upon a time", "--prompt", "In the beginning")
    arguments += ("--temperature", "1", "--max-tokens", "12", "--seed", "5")
    status, first, _ = example(*arguments)
    assert status == 0
    assert first.count("\n> ") == 2
    assert "12 tokens]" in first
    _, second, _ = example(*arguments)
    assert without_speed(first) == without_speed(second)


def without_speed(text: str) -> str:
    return re.sub(r"in [\d.]+ s: [\d.]+ tokens/s", "", text)


def test_the_example_runs_a_prompt_set(example):
    status, printed, _ = example("--set", "prose_and_code", "--max-tokens", "2")
    assert status == 0
    assert printed.count("\n> ") == 20
    assert "\n> import os\n\ndef" in printed


def test_the_example_takes_the_checkpoint_from_the_environment(example, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(TINY_QUANT))
    status, printed, _ = example("--no-chat", "--prompt", "Hello", "--max-tokens", "3")
    assert status == 0
    assert "3 tokens]" in printed


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (("--model", "no/such-model-anywhere"), {}, "no/such-model-anywhere"),
        (("--temperature", "-1"), {}, "temperature"),
        ((), {"DEEPINFER_USE_NEXTN_DECODE": "many"}, "DEEPINFER_USE_NEXTN_DECODE='many'"),
        ((), {"DEEPINFER_HF_MODEL": "x"}, "nearest one is DEEPINFER_HF_MODEL_DIR"),
    ],
)
def test_what_the_example_cannot_do_is_one_line(
    example, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], env: dict[str, str], message: str
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    status, printed, errors = example(*arguments)
    assert status == 2
    assert printed == ""
    assert errors.startswith("offline_inference.py: ")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_the_example_of_structured_output_follows_its_shapes():
    command = [sys.executable, "examples/structured_output.py", "--temperature", "1", "--seed", "4"]
    result = run(command, env=clean_env(PYTHONPATH=str(ROOT)))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout.count("follows its shape") == 4
    assert [line.partition(":")[0] for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "json",
        "regex",
        "ebnf",
        "trigger",
    ]


def test_the_benchmark_of_structured_output_runs():
    command = [sys.executable, "examples/benchmark_structured_output.py"]
    command += ["--batch", "2", "--tokens", "5", "--repeats", "1", "--drafts", "1"]
    result = run(command, env=clean_env(PYTHONPATH=str(ROOT)))
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| ([a-zA-Z][^|]*?) \| [-+\d.,% |]+\|$", result.stdout, re.MULTILINE)
    assert rows[-3:] == ["none", "half", "all"] and "record" in rows and len(rows) >= 9
