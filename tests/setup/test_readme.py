"""The README's promises: its program runs, its links lead somewhere, the example answers."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.paths import ROOT
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


def example(*arguments: str, **env: str):
    command = [sys.executable, "examples/offline_inference.py", *arguments]
    return run(command, env=clean_env(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", **env))


def test_the_example_answers_its_own_prompts():
    result = example()
    assert result.returncode == 0, result.stderr
    capital, story, total, json_answer = result.stdout.split("\n> ")[1:]
    assert "Paris" in capital
    assert "[stop, " in capital
    assert "fox" in story
    assert len(story.split()) > 30
    assert "19" in total.splitlines()[1]
    assert '"Anna"' in json_answer
    assert re.search(r"4 prompts, \d+ tokens in [\d.]+ s: [\d.]+ tokens/s\n$", result.stdout)


def test_the_example_continues_text_and_repeats_a_seed():
    arguments = ("--no-chat", "--prompt", "Once upon a time", "--prompt", "In the beginning")
    arguments += ("--temperature", "1", "--max-tokens", "12", "--seed", "5")
    first, second = example(*arguments), example(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\n> ") == 2
    assert "12 tokens]" in first.stdout
    assert strip_speed(first.stdout) == strip_speed(second.stdout)


def strip_speed(text: str) -> str:
    return re.sub(r"in [\d.]+ s: [\d.]+ tokens/s", "", text)


def test_the_example_takes_the_checkpoint_from_the_environment():
    result = example(
        "--no-chat", "--prompt", "Hello", "--max-tokens", "3", DEEPINFER_HF_MODEL_DIR="tests/data/tiny-quant"
    )
    assert result.returncode == 0, result.stderr
    assert "3 tokens]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (("--model", "no/such-model-anywhere"), {}, "no/such-model-anywhere"),
        (("--temperature", "-1"), {}, "temperature"),
        ((), {"DEEPINFER_USE_NEXTN_DECODE": "many"}, "DEEPINFER_USE_NEXTN_DECODE='many'"),
        ((), {"DEEPINFER_HF_MODEL": "x"}, "nearest one is DEEPINFER_HF_MODEL_DIR"),
    ],
)
def test_what_the_example_cannot_do_is_one_line(arguments: tuple, env: dict, message: str):
    result = example(*arguments, **env)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
