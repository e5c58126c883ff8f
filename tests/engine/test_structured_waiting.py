"""Requests that wait for grammars: they hold up nobody, hostile ones end theirs only, and the settings."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepinfer.engine.structured import StructuredRequests
from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output import process
from deepinfer.structured_output.builder import GrammarBuilder, GrammarError
from deepinfer.structured_output.request import GrammarSpec
from tests.engine.structured import PROMPT, regex
from tests.structured_output.test_builder import LARGE, SLOW, until
from tests.support.engines import assert_idle, facts, generate, make_llm
from tests.support.so_vocabulary import EOS, PAD_SIZE, VOCABULARY


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("v41-tiny") as llm:
        yield llm


def slow_request(**options: Any) -> SamplingParams:
    return SamplingParams(so_args={"schema_type": "ebnf", "schema": SLOW.source}, **options)


def test_requests_that_wait_hold_up_nobody_and_can_be_aborted(llm: LLM):
    engine = llm.llm_engine
    engine.add_request("waits", PROMPT, slow_request())
    engine.add_request("dropped", PROMPT, slow_request())
    with pytest.raises(ValueError, match="'waits' is still running"):
        engine.add_request("waits", PROMPT)
    with pytest.raises(ValueError, match="'waits' is still running"):
        engine.add_request("waits", PROMPT, slow_request())
    assert engine.so_builder_has_pending() and engine.get_num_unfinished_requests() == 2
    free = SamplingParams(max_tokens=6, temperature=0)
    assert llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    assert llm.generate([PROMPT], regex("[a-z]{3}"), use_tqdm=False)[0].outputs[0].finish_reason == "stop"
    assert engine.get_num_unfinished_requests() == 2, "they still wait"
    engine.drop_request(["dropped"])
    aborts: list[int] = []
    names = ["waits", "dropped", "unknown"]
    thread = threading.Thread(target=lambda: aborts.append(engine.abort_request(names)))
    thread.start()
    thread.join()
    assert aborts == [1] and engine.abort_request("waits") == 0
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert (output.request_id, output.finished, output.prompt_token_ids) == ("waits", True, PROMPT)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
    assert not engine.has_unfinished_requests() and not engine.so_builder_has_pending()
    assert_idle(llm)


def test_hostile_grammars_end_their_requests_only():
    nested = json.loads('{"type":"array","items":' * 90 + '{"type":"integer"}' + "}" * 90)
    hostile = {
        "slow": (SLOW, "within 1 seconds"),
        "large": (LARGE, "make it smaller"),  # memory or time is over first
        "repeats": (
            {"schema_type": "regex", "schema": "(((a{1,900}b){1,900}c){1,900}d){1,900}"},
            "at most 20000",
        ),
        "catastrophic": ({"schema_type": "regex", "schema": "((a+)+|(a|aa)+)+b"}, ""),
        "recursion": ({"schema_type": "ebnf", "schema": 'root ::= root root | "a" | ""'}, ""),
        "brackets": (
            {"schema_type": "regex", "schema": "(" * 5000 + "a" + ")" * 5000},
            "at most 100 levels",
        ),
        "deep": (
            {"schema_type": "json", "schema": '{"items":' * 300 + "{}" + "}" * 300},
            "at most 100 levels",
        ),
        "nested": ({"schema_type": "json", "schema": nested}, ""),
        "schema": (
            {"schema_type": "json", "schema": {"properties": {"a": {"not": {}}}}},
            "#/properties/a/not: ",
        ),
        "syntax": ({"schema_type": "ebnf", "schema": "root ::= nothing"}, '"nothing" is not defined'),
    }
    settings = Settings(grammar_timeout_s=1, grammar_memory_bytes=512 << 20, num_draft_tokens=2)
    good = regex("[a-z]{3,30}[0-9]", temperature=1.0, seed=3)
    with make_llm("v41-tiny", settings=settings) as llm:
        expected = facts(generate(llm, [PROMPT], good))
        params = [
            SamplingParams(
                max_tokens=30,
                temperature=0,
                so_args=args if isinstance(args, dict) else {"schema_type": "ebnf", "schema": args.source},
            )
            for args, _ in hostile.values()
        ]
        start = time.monotonic()
        outputs = generate(llm, [PROMPT] * (len(params) + 1), [good, *params])
        assert time.monotonic() - start < 60
        assert facts(outputs[:1]) == expected
        for (name, (_, message)), output in zip(hostile.items(), outputs[1:], strict=True):
            error = output.error
            assert error is None or error.kind == "grammar", f"{name}: {error}"
            # Without a message it may be small enough after all.
            assert not message or message in error.message, f"{name}: {error}"
        assert facts(generate(llm, [PROMPT], good)) == expected


def test_close_ends_requests_that_wait():
    llm = make_llm("v41-tiny")
    llm.llm_engine.add_request("waits", PROMPT, slow_request())
    llm.llm_engine.step()
    builder = llm.llm_engine.grammar_builder
    start = time.monotonic()
    llm.close()
    llm.close()
    assert time.monotonic() - start < 10 and builder.process.pid is None


def test_the_wait_counts_in_the_metrics(monkeypatch: pytest.MonkeyPatch):
    real = process.BuilderProcess._grammar

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.4)
        return real(self, *args)

    with make_llm("v41-tiny") as llm:
        generate(llm, [PROMPT], regex("a"))
        monkeypatch.setattr(process.BuilderProcess, "_grammar", late)
        (output,) = generate(llm, [PROMPT], regex("[a-z]{3}"))
        assert output.metrics.queue_ms >= 400 and output.metrics.ttft_ms >= 400


def test_without_the_library_requests_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package xgrammar: install deepinfer\[structured\]"):
        llm.generate([PROMPT], regex("a"), use_tqdm=False)


# --- settings -----------------------------------------------------------------------------------------------


@pytest.fixture
def builder_with() -> Iterator[Callable[..., GrammarBuilder]]:
    made: list[StructuredRequests] = []

    def make(**settings: Any) -> GrammarBuilder:
        made.append(
            StructuredRequests(
                None, None, lambda: VOCABULARY, PAD_SIZE, EOS, frozenset(), Settings(**settings)
            )
        )
        return made[-1].builder

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        ({}, True),
        ({"grammar_cache_bytes": 0}, True),
        ({"grammar_cache_bytes": 1}, False),
        ({"disable_grammar_cache": True}, False),
    ],
    ids=str,
)
def test_settings_of_the_cache(
    builder_with: Callable[..., GrammarBuilder], settings: dict[str, Any], is_kept: bool
):
    builder, spec = builder_with(**settings), GrammarSpec("regex", "ab")
    builder.request(spec).result(60)
    until(lambda: builder.num_building == 0)
    assert (builder.num_bytes > 0) == is_kept and builder.request(spec).done() == is_kept
    assert builder.stats.num_hits == is_kept


@pytest.mark.parametrize(("num_processes", "num_cpus", "at_once"), [(1, 8, 1), (4, 1, 1), (2, 8, 2)])
def test_settings_of_processes_and_time(
    builder_with: Callable[..., GrammarBuilder],
    monkeypatch: pytest.MonkeyPatch,
    num_processes: int,
    num_cpus: int,
    at_once: int,
):
    monkeypatch.setattr("os.cpu_count", lambda: num_cpus)
    builder = builder_with(grammar_processes=num_processes, grammar_timeout_s=1)
    tickets = [builder.request(GrammarSpec("ebnf", f'{SLOW.source} | "{place}"')) for place in range(2)]
    for ticket in tickets:
        with pytest.raises(GrammarError, match="within 1 seconds"):
            ticket.result(60)
    first, second = (ticket.build for ticket in tickets)
    assert (second.start < first.start + first.seconds) == (at_once == 2)
