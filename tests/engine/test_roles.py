"""Roles: a PROMPT and a COMPLETION engine together give what one engine gives, bit by bit."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine_type import EngineType
from deepinfer.entrypoints.llm import LLM
from deepinfer.kv_transfer.connector import TransferError
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector, SharedMemoryListener
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import facts, generate, make_llm, prompt_of
from tests.support.paths import V41_TINY
from tests.support.process import clean_env
from tests.support.roles import check_idle, connect, engine_pair, make_engine, run_pair

TEXT = "Once upon a time there was a brave girl"


def requests() -> dict[str, tuple[Any, SamplingParams]]:
    """Lengths around borders of blocks and groups, and every kind of sampling."""
    cases: dict[str, tuple[Any, SamplingParams]] = {}
    for length in (1, 2, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 300, 641):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
        cases[f"greedy {length}"] = list(prompt_of(length, length)), params
    for length in (7, 128, 200, 513):
        params = SamplingParams(
            temperature=0.9,
            top_p=0.95,
            max_tokens=20,
            min_tokens=4,
            seed=length,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={5: 1.5, 9: -2.0},
            logprobs=1,
            prompt_logprobs=2,
        )
        cases[f"sampled {length}"] = list(prompt_of(length, length)), params
        cases[f"ratio {length}"] = cases[f"sampled {length}"][0], params.clone(verification="ratio")
    cases["text"] = TEXT, SamplingParams(temperature=0, max_tokens=40)
    cases["stop string"] = TEXT, SamplingParams(temperature=0, max_tokens=40, stop=["and", "the "])
    cases["golden"] = TEXT, SamplingParams(temperature=0, max_tokens=9, golden_token_ids=[7, -1, 9])
    cases["one token"] = TEXT, SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    cases["first token stops"] = TEXT, SamplingParams(golden_token_ids=[11], stop_token_ids=[11])
    return cases


def expected(cases: dict[str, tuple[Any, SamplingParams]], settings: Settings, **options: Any) -> list[Any]:
    """Facts of a NORMAL engine."""
    with make_llm(settings=settings, **options) as llm:
        prompts, params = [prompt for prompt, _ in cases.values()], [params for _, params in cases.values()]
        return facts(generate(llm, prompts, params))


@pytest.mark.parametrize(
    ("transport", "use_async", "num_drafts"),
    [
        ("shared memory", True, 5),
        ("shared memory", False, 0),
        ("store", None, 5),
        ("store", True, 0),
        ("shared memory", False, 5),
    ],
)
def test_two_engines_equal_one(transport: str, use_async: bool | None, num_drafts: int) -> None:
    """`None` is each role's own default."""
    cases = requests()
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=num_drafts)
    wanted = expected(cases, settings)
    with engine_pair(transport, settings) as (prompt, completion):
        results = run_pair(prompt, completion, cases)
        assert facts([results[name] for name in cases]) == wanted
        num_local = sum(len(output.outputs[0].token_ids) == 1 for output in results.values())
        assert num_local >= 2  # they end where they begin
        for engine in (prompt, completion):
            assert engine.hand_off_stats.num_sequences == len(cases) - num_local
            assert engine.hand_off_stats.num_failed == 0
        assert prompt.hand_off_stats.num_bytes == completion.hand_off_stats.num_bytes > 0
        # One of them prefills and never decodes, the other one the other way round.
        assert completion.stats.num_prefill_steps == 0 and completion.stats.num_prefill_tokens == 0
        assert prompt.stats.num_prefill_steps == prompt.stats.num_steps
        assert sum(output.metrics.ttft_ms is not None for output in results.values()) == len(cases)


def several() -> dict[str, tuple[Any, SamplingParams]]:
    """Requests of several completions: all go on elsewhere, some, or none."""
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
    half = sampled.clone(n=5, stop_token_ids=list(range(0, 2000, 2)), logprobs=None)
    return {
        "three": (list(prompt_of(130, 1)), sampled.clone(n=3)),
        "many": (list(prompt_of(200, 2)), sampled.clone(n=9, presence_penalty=0.5)),
        "scored": (list(prompt_of(129, 3)), sampled.clone(n=3, prompt_logprobs=2)),
        "some end": (list(prompt_of(128, 4)), half),
        "some end, scored": (list(prompt_of(60, 5)), half.clone(prompt_logprobs=1, logprobs=2)),
        "none goes on": (list(prompt_of(60, 6)), sampled.clone(n=3, max_tokens=1)),
        "stop strings": (TEXT, SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=30, stop=["e", "a"])),
        "ratio": (TEXT, sampled.clone(n=3, verification="ratio", max_tokens=6)),
    }


@pytest.mark.parametrize(
    ("use_async", "num_drafts", "max_num_seqs"), [(None, 5, 32), (True, 0, 4), (False, 2, 4)]
)
def test_several_completions(use_async: bool | None, num_drafts: int, max_num_seqs: int) -> None:
    cases = several()
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=num_drafts)
    wanted = expected(cases, settings)
    with engine_pair(settings=settings, max_num_seqs=max_num_seqs) as (prompt, completion):
        results = run_pair(prompt, completion, cases)
        for name, want in zip(cases, wanted, strict=True):
            assert facts([results[name]]) == [want], name
        assert len(results["many"].outputs) == 9
        lengths = [len(sample.token_ids) for sample in results["some end"].outputs]
        assert 1 in lengths and max(lengths) > 1
        num_prompts = sum(len(results[name].prompt_token_ids) for name in cases)
        assert prompt.stats.num_prefill_tokens < 2 * num_prompts, "a prompt is prefilled once, or found"
        assert completion.stats.num_prefill_tokens == 0
        assert prompt.hand_off_stats.num_sequences == completion.hand_off_stats.num_sequences > 20
        assert not prompt._hand_off._begun


def test_several_completions_come_to_an_end() -> None:
    """Aborted and dropped on either side while some of them are here and some there."""
    params = SamplingParams(temperature=1.0, seed=1, n=6, max_tokens=40, ignore_eos=True)
    with engine_pair(max_num_seqs=2) as (prompt, completion):
        for name in ("aborted here", "dropped here", "aborted there", "dropped there"):
            prompt.add_request(name, list(prompt_of(50, len(name))), params)
            results: dict[str, Any] = {}
            while not prompt._hand_off._begun:
                prompt.step()
                completion.step()
            side = prompt if name.endswith("here") else completion
            if name.startswith("aborted"):
                side.abort_request(name)
            else:
                side.drop_request([name])
            deadline = time.monotonic() + 60
            while any(engine.has_unfinished_requests() for engine in (prompt, completion)):
                assert time.monotonic() < deadline, name
                if prompt.has_unfinished_requests():
                    prompt.step()
                results |= {output.request_id: output for output in completion.step()}
                if name == "dropped there" and not prompt.has_unfinished_requests():
                    completion.abort_request(name)  # what came later is a request once more
            if name != "dropped there":
                reasons = {sample.finish_reason for sample in results[name].outputs}
                assert len(results[name].outputs) == 6 and "abort" in reasons


def test_few_slots_and_blocks() -> None:
    """Room is short on both sides: hand-offs wait, and what was taken over is preempted and recomputed."""
    cases = {
        f"request {row}": (
            list(prompt_of(100 + 13 * row, row)),
            SamplingParams(temperature=0.7, seed=row, max_tokens=150, ignore_eos=True),
        )
        for row in range(12)
    }
    settings = Settings()
    wanted = expected(cases, settings)
    with engine_pair(settings=settings, max_num_seqs=4, max_model_len=512, num_blocks=8) as (
        prompt,
        completion,
    ):
        results = run_pair(prompt, completion, cases)
        assert facts([results[name] for name in cases]) == wanted
        assert completion.stats.num_preemptions > 0
        assert prompt.hand_off_stats.num_sequences == completion.hand_off_stats.num_sequences == 12


def test_equal_prompts_are_prefilled_once() -> None:
    """Forks of a prompt are handed off like the prompt itself, and are found in the cache afterwards."""
    prompt_ids = list(prompt_of(300, 3))
    cases = {
        str(seed): (prompt_ids, SamplingParams(temperature=1.0, seed=seed, max_tokens=12, logprobs=0))
        for seed in range(5)
    }
    wanted = expected(cases, Settings())
    with engine_pair() as (prompt, completion):
        for _ in range(2):
            results = run_pair(prompt, completion, cases)
            assert facts([results[name] for name in cases]) == wanted
        assert prompt.stats.num_prefill_tokens < 2 * len(prompt_ids)
        assert min(output.num_cached_tokens for output in results.values()) == 256


def test_streaming_and_aborts() -> None:
    """A streamed request goes on streaming; aborted ones end on the side where they are."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with engine_pair() as (prompt, completion):
        prompt.add_request("streamed", TEXT, params, stream=True)
        prompt.add_request("early", TEXT, params)
        prompt.add_request("late", TEXT + " and a boy", params)
        assert prompt.abort_request("early") == 1
        lengths, reasons = [], {}
        while len(reasons) < 3:
            for engine in (prompt, completion):
                for output in engine.step():
                    sample = output.outputs[0]
                    if output.request_id == "streamed":
                        lengths.append(len(sample.token_ids))
                    if output.finished and sample.finish_reason != "handed_off":
                        reasons[output.request_id] = sample.finish_reason
            completion.abort_request("late")
        assert reasons == {"streamed": "length", "early": "abort", "late": "abort"}
        assert lengths == sorted(lengths) and len(set(lengths)) > 5


def test_waiting_for_the_other_side_to_take() -> None:
    """Until it takes something, the prompt engine's pools are the limit of what waits."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompt = make_engine(EngineType.PROMPT, max_num_seqs=4, max_model_len=512, num_blocks=5)
    completion = make_engine(EngineType.COMPLETION, max_num_seqs=4)
    connect(prompt, completion, max_bytes_in_flight=1)
    for row in range(9):
        prompt.add_request(str(row), list(prompt_of(50, row)), params)
    handed_off = []
    for _ in range(12):
        handed_off += prompt.step()
        prompt.core.check_integrity()
    assert len(handed_off) == 1 and prompt.core.num_waiting > 0
    results = []
    while len(results) < 9:
        prompt.step()
        results += completion.step()
    for engine in (prompt, completion):
        check_idle(engine)
        engine.close()


@pytest.mark.parametrize("use_async", [True, False])
def test_interrupted_steps(use_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of either engine fails at any of its stations: nothing is lost, tokens stay what they are."""
    cases = {
        f"request {row}": (
            list(prompt_of(60 + 30 * row, row)),
            SamplingParams(temperature=0.8, seed=row, max_tokens=12, logprobs=0, stop=["zzzz"] * (row % 2)),
        )
        for row in range(6)
    }
    settings = Settings(use_async_scheduling=use_async)
    wanted = expected(cases, settings)
    raised: list[str] = []
    with engine_pair(settings=settings) as (prompt, completion):
        for engine in (prompt, completion):
            for owner, name in (
                (engine._builder, "batch"),
                (engine._builder, "sampling"),
                (engine._assembler, "collect"),
                (engine._hand_off, "after_commit"),
                (engine._pools, "read"),
                (engine._pools, "write"),
            ):
                # A copy takes its time, so that the step goes on before it fails.
                delay = 0.1 if owner is engine._pools else 0.0
                fail_once(monkeypatch, owner, name, at=3, delay=delay, raised=raised)
        for name, (text, params) in cases.items():
            prompt.add_request(name, text, params)
        results: dict[str, Any] = {}
        num_failed, deadline = 0, time.monotonic() + 60
        while len(results) < len(cases):
            assert time.monotonic() < deadline
            for engine in (prompt, completion):
                try:
                    outputs = engine.step()
                except InterruptedError:
                    num_failed += 1
                    continue
                finally:
                    engine.core.check_integrity()
                for output in outputs:
                    if output.outputs[0].finish_reason != "handed_off":
                        results[output.request_id] = output
        assert num_failed >= 5 and {"read", "write"} <= set(raised)
        assert facts([results[name] for name in cases]) == wanted


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int, delay: float, raised: list[str]
) -> None:
    """Let the call number `at` of a method fail."""
    method, count = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            raised.append(name)
            time.sleep(delay)
            raise InterruptedError(f"{name} was interrupted")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


def test_the_completion_engine_goes() -> None:
    """What it has not taken ends with an error, so does what comes later; the prompt engine stays usable."""
    params = SamplingParams(temperature=0, max_tokens=5)
    prompt, completion = make_engine(EngineType.PROMPT), make_engine(EngineType.COMPLETION)
    connect(prompt, completion)
    prompt.add_request("sent", TEXT, params)
    while prompt.has_unfinished_requests():
        (output,) = prompt.step() or [None]
    assert output.outputs[0].finish_reason == "handed_off"
    completion.close()
    prompt.add_request("later", TEXT, params)
    prompt.add_request("short", TEXT, params.clone(max_tokens=1))
    results = {}
    while prompt.has_unfinished_requests() or "sent" not in results:
        results |= {output.request_id: output.outputs[0] for output in prompt.step()}
    for name in ("sent", "later"):
        assert results[name].finish_reason == "error" and results[name].error.kind == "transfer"
        assert f"request {name}: the completion engine" in results[name].error.message
    assert results["short"].finish_reason == "length"
    check_idle(prompt)
    prompt.close()


def test_the_prompt_engine_goes() -> None:
    """What it had handed off is completed."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt, completion = make_engine(EngineType.PROMPT), make_engine(EngineType.COMPLETION)
    connect(prompt, completion)
    for name in ("a", "b"):
        prompt.add_request(name, TEXT + name, params)
    while prompt.has_unfinished_requests():
        prompt.step()
    assert completion.wait_for_requests(5.0)
    prompt.close()
    results = []
    while len(results) < 2:
        results += completion.step()
    assert {len(output.outputs[0].token_ids) for output in results} == {12}
    assert not completion.wait_for_requests(0.0)
    check_idle(completion)
    completion.close()


CHILD = """
import functools, sys
from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.engine.engine_type import EngineType
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.kv_transfer.shared_memory import SharedMemoryConnector

args = EngineArgs.from_kwargs(model=sys.argv[1], engine_type=EngineType.COMPLETION, max_num_seqs=32,
                              max_model_len=1024, disable_log_stats=True)
engine = LLMEngine.from_engine_args(args)
engine.connect(functools.partial(SharedMemoryConnector.connect, sys.argv[2]))
while engine.wait_for_requests(0.0 if engine.has_unfinished_requests() else 0.5) or \\
        engine.has_unfinished_requests():
    for output in engine.step():
        sample = output.outputs[0]
        print(repr((output.request_id, sample.token_ids, sample.text, sample.token_logprobs,
                    sample.finish_reason, sample.stop_reason)), flush=True)
engine.settle()
engine.core.check_integrity()
print("prefilled", engine.stats.num_prefill_tokens, engine.core.num_free_slots, flush=True)
"""


def start_child(tmp_path: Path) -> tuple[Any, subprocess.Popen[str]]:
    """A connected PROMPT engine, and a process that completes."""
    prompt = make_engine(EngineType.PROMPT)
    path = tmp_path / "socket"
    with SharedMemoryListener(path) as listener:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(V41_TINY), str(path)],
            env=clean_env(),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            prompt.connect(lambda identity, layout: listener.accept(identity, layout, timeout_s=120))
        except BaseException:
            child.kill()
            raise
    return prompt, child


def test_two_processes(tmp_path: Path) -> None:
    cases = requests()
    with make_llm() as llm:
        outputs = generate(llm, [prompt for prompt, _ in cases.values()], [p for _, p in cases.values()])
        wanted = {name: row(output) for name, output in zip(cases, outputs, strict=True)}
    prompt, child = start_child(tmp_path)
    try:
        results = {}
        for name, (text, params) in cases.items():
            prompt.add_request(name, text, params)
        while prompt.has_unfinished_requests():
            for output in prompt.step():
                if output.outputs[0].finish_reason != "handed_off":
                    results[output.request_id] = row(output)
        check_idle(prompt)
        num_sent = prompt.hand_off_stats.num_sequences
        lines = [child.stdout.readline() for _ in range(num_sent)]
        prompt.close()
        last, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    for line in lines:
        name, *facts_of_one = eval(line, {"nan": float("nan")})
        results[name] = tuple(facts_of_one)
    assert results == wanted and num_sent < len(cases)
    assert last.startswith("prefilled 0 ")


def row(output: Any) -> tuple[Any, ...]:
    sample = output.outputs[0]
    return sample.token_ids, sample.text, sample.token_logprobs, sample.finish_reason, sample.stop_reason


def test_the_other_process_is_killed(tmp_path: Path) -> None:
    prompt, child = start_child(tmp_path)
    try:
        prompt.add_request("before", TEXT, SamplingParams(temperature=0, max_tokens=5))
        while prompt.has_unfinished_requests():
            prompt.step()
        assert child.stdout.readline().startswith("('before'")
    finally:
        child.kill()
        child.wait()
    prompt.add_request("after", TEXT, SamplingParams(temperature=0, max_tokens=5))
    results = []
    while prompt.has_unfinished_requests():
        results += prompt.step()
    (output,) = results
    assert output.outputs[0].error.kind == "transfer" and "request after" in output.outputs[0].error.message
    check_idle(prompt)
    prompt.close()


def test_what_roles_refuse() -> None:
    with pytest.raises(ValueError, match="LLM runs whole requests"):
        LLM(str(V41_TINY), engine_type=EngineType.PROMPT)
    prompt, completion = make_engine(EngineType.PROMPT), make_engine(EngineType.COMPLETION)
    with pytest.raises(RuntimeError, match="connect the PROMPT engine"):
        prompt.add_request("a", TEXT)
    connect(prompt, completion)
    with pytest.raises(RuntimeError, match="takes its requests from a PROMPT engine"):
        completion.add_request("a", TEXT)
    for engine in (prompt, completion):
        with pytest.raises(ValueError, match="connect"):
            engine.connect(lambda identity, layout: None)
        engine.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"num_draft_tokens": 0}, {}),
        ({}, {"replay_mode": "compact", "replay_keep_tokens": 140}),
        (
            {"replay_mode": "compact", "replay_keep_tokens": 140},
            {"replay_mode": "compact", "replay_keep_tokens": 141},
        ),
    ],
)
def test_engines_that_do_not_fit(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Another cache layout, and other windows under bounded replay, are refused when the two meet."""
    prompt = make_engine(EngineType.PROMPT, Settings(**one))
    completion = make_engine(EngineType.COMPLETION, Settings(**other))
    failures = []

    def accept() -> None:
        try:
            completion.connect(listener.accept)
        except TransferError as error:
            failures.append(error)

    with SharedMemoryListener(tmp_path / "socket") as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(TransferError):
            prompt.connect(functools.partial(SharedMemoryConnector.connect, tmp_path / "socket"))
        thread.join()
    assert failures
    prompt.close()
    completion.close()
