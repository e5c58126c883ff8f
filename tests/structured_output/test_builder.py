"""The grammar builder: its cache, and builds that crash, hang or grow, which harm nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from deepinfer.structured_output.builder import BuildLimits, GrammarBuilder, GrammarError
from deepinfer.structured_output.frames import FrameReader, frame_bytes
from deepinfer.structured_output.grammar import Vocabulary
from deepinfer.structured_output.matcher import SequenceMatcher
from deepinfer.structured_output.request import GrammarSpec
from tests.support.paths import ROOT
from tests.support.process import clean_env
from tests.support.so_vocabulary import PAD_SIZE, VOCABULARY, compiled, tokens_of

WAIT_S = 60
# Within the limits of the audit, these take the compiler more than half a minute, and gigabytes.
SLOW = GrammarSpec("ebnf", "root ::= " + " | ".join(f'"{"a" * (i % 31)}{i}"' for i in range(14_000)))
LARGE = GrammarSpec("ebnf", "root ::= " + "(" * 190 + '"a"' + ' "b"?){0,20}' * 190)


def limits(**changes: float) -> BuildLimits:
    return BuildLimits(**{"num_processes": 2, "timeout_s": 30.0, "memory_bytes": 1 << 30, **changes})


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarBuilder]]:
    made = []

    def make(cache_bytes: int = 1 << 30, **changes: float) -> GrammarBuilder:
        made.append(GrammarBuilder(lambda: VOCABULARY, limits(**changes), cache_bytes))
        return made[-1]

    yield make
    for builder in made:
        builder.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarBuilder]:
    """One whose process runs already."""
    builder = GrammarBuilder(lambda: VOCABULARY, limits(), 1 << 30)
    builder.request(GrammarSpec("regex", "a")).result(WAIT_S)
    yield builder
    builder.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_built_grammar_is_the_one_compiled_here(shared: GrammarBuilder):
    for kind, source in (
        ("regex", "[ab]*1|é"),
        ("ebnf", 'root ::= "a" root | "b"'),
        ("choice", '["ab","abc","é"]'),
        ("json", '{"type":"array","items":{"enum":[1,2]}}'),
        ("json_object", ""),
        ("structural_tag", '{"type":"structural_tag","format":{"type":"const_string","value":"abc"}}'),
    ):
        built = SequenceMatcher(shared.request(GrammarSpec(kind, source)).result(WAIT_S), PAD_SIZE, [1])
        own = SequenceMatcher(compiled(kind, source), PAD_SIZE, [1])
        rng = np.random.default_rng(0)
        for _ in range(20):
            mine, other = own.fill(), built.fill()
            assert (mine is None and other is None) or (mine == other).all(), f"{kind=} {source=}"
            if mine is None:
                break
            token = int(rng.choice(sorted(tokens_of(mine))))
            assert own.accept(token) and built.accept(token)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "[a-", "position"),
        ("regex", "(a)\\1", "back reference"),
        ("ebnf", "root ::= foo", 'Rule "foo" is not defined'),
        ("json", '{"type":"object","properties":{"a":{"not":{}}}}', "#/properties/a/not: "),
        ("json", '{"type":"strin"}', "#/type: "),
        ("regex", "[0-9]{3,7}[d-z]", "neither continued nor ended"),  # no token has these letters
    ],
)
def test_what_does_not_compile_says_why(shared: GrammarBuilder, kind: str, source: str, message: str):
    with pytest.raises(GrammarError) as caught:
        shared.request(GrammarSpec(kind, source)).result(WAIT_S)
    assert message in str(caught.value)
    assert ".cc:" not in str(caught.value), "no places in somebody's sources"
    assert shared.request(GrammarSpec("regex", "a")).done(), "others go on"


def test_equal_grammars_are_built_once(make: Callable[..., GrammarBuilder]):
    builder, spec = make(), GrammarSpec("regex", "a+b")
    start = time.perf_counter()
    tickets = [builder.request(GrammarSpec("regex", "a+b", (3,), 4)) for _ in range(5)]
    assert time.perf_counter() - start < 1, "nobody waits for the process to start"
    assert len({id(ticket.result(WAIT_S)) for ticket in tickets}) == 1
    until(lambda: builder.num_building == 0)
    assert builder.request(spec).done() and builder.request(spec).result() is tickets[0].result()
    assert builder.request(GrammarSpec("choice", '["a"]')).result(WAIT_S) is not tickets[0].result()
    stats = builder.stats
    assert (stats.num_requests, stats.num_hits, stats.num_joined, stats.num_builds) == (8, 2, 4, 2)
    assert stats.num_failed == stats.num_evicted == 0 and builder.num_bytes > 0


def test_the_cache_keeps_the_newest_within_its_bytes(make: Callable[..., GrammarBuilder]):
    builder = make()
    specs = [GrammarSpec("regex", f"a{{{n}}}b*[ab]c") for n in range(1, 5)]

    def build(builder: GrammarBuilder, spec: GrammarSpec) -> None:
        builder.request(spec).result(WAIT_S)
        until(lambda: builder.num_building == 0)

    sizes = []
    for spec in specs:
        before = builder.num_bytes
        build(builder, spec)
        sizes.append(builder.num_bytes - before)
    small = make(cache_bytes=sizes[0] + sizes[1] + sizes[2])
    for spec in (*specs[:3], specs[0], specs[3]):  # the last one takes the place of the second
        build(small, spec)
    assert small.stats.num_evicted >= 1 and 0 < small.num_bytes <= sum(sizes[:3])
    hits = small.stats.num_hits
    assert small.request(specs[0]).done() and not small.request(specs[1]).done()
    assert small.stats.num_hits == hits + 1


def test_without_a_cache_everything_is_built_anew(make: Callable[..., GrammarBuilder]):
    builder, spec = make(cache_bytes=0), GrammarSpec("regex", "ab")
    builder.request(spec).result(WAIT_S)
    until(lambda: builder.num_building == 0)
    builder.request(spec).result(WAIT_S)
    assert builder.stats.num_hits == 0 and builder.num_bytes == 0


def test_a_build_that_hangs_ends_alone(make: Callable[..., GrammarBuilder]):
    builder = make(timeout_s=1.0)
    hanging = builder.request(SLOW)
    until(lambda: hanging.build.pid is not None)
    good = builder.request(GrammarSpec("regex", "a+"))
    good.result(WAIT_S)
    assert not hanging.done(), "it holds up nobody"
    pid = hanging.build.pid
    with pytest.raises(
        GrammarError, match=r"did not compile within 1 seconds \(DEEPINFER_XGRAMMAR_TIMEOUT\)"
    ):
        hanging.result(WAIT_S)
    assert not is_alive(pid) and is_alive(builder.process.pid)
    until(lambda: builder.num_building == 0)
    assert 0.9 < hanging.build.seconds < 20 and builder.stats.num_failed == 1


def test_a_stopped_build_is_beyond_its_time_too(make: Callable[..., GrammarBuilder]):
    """It does nothing at all, not even use its time."""
    builder = make(timeout_s=2.0)
    ticket = builder.request(SLOW)
    until(lambda: ticket.build.pid is not None)
    os.kill(ticket.build.pid, signal.SIGSTOP)
    with pytest.raises(GrammarError, match="did not compile within 2 seconds"):
        ticket.result(WAIT_S)
    builder.request(GrammarSpec("regex", "a+")).result(WAIT_S)


def test_a_build_that_is_killed_ends_alone(make: Callable[..., GrammarBuilder]):
    builder = make()
    ticket, other = builder.request(SLOW), builder.request(GrammarSpec("regex", "a*1"))
    until(lambda: ticket.build.pid is not None)
    os.kill(ticket.build.pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match=r"the compiler crashed on it \(signal SIGKILL\)"):
        ticket.result(WAIT_S)
    other.result(WAIT_S)


def test_a_build_that_takes_too_much_memory_ends_alone(make: Callable[..., GrammarBuilder]):
    builder = make(memory_bytes=256 << 20)
    with pytest.raises(GrammarError, match="more than 256 MiB to compile"):
        builder.request(LARGE).result(WAIT_S)
    builder.request(GrammarSpec("regex", "a*1")).result(WAIT_S)


def test_a_result_that_is_too_large_ends_alone(make: Callable[..., GrammarBuilder]):
    builder = make(result_bytes=20_000)
    with pytest.raises(GrammarError, match="compiled it takes more than 0 MiB"):
        builder.request(GrammarSpec("regex", "[ab]{1,500}1")).result(WAIT_S)
    builder.request(GrammarSpec("regex", "a*1")).result(WAIT_S)


def test_a_lost_process_is_replaced_and_its_builds_begin_again(make: Callable[..., GrammarBuilder]):
    builder = make(timeout_s=2.0)
    ticket = builder.request(SLOW)
    until(lambda: ticket.build.pid is not None)
    first, build = builder.process.pid, ticket.build.pid
    os.kill(first, signal.SIGKILL)
    builder.request(GrammarSpec("regex", "a*1")).result(WAIT_S)
    with pytest.raises(GrammarError, match="did not compile within"):
        ticket.result(WAIT_S)
    assert ticket.build.num_attempts == 2 and builder.process.pid != first
    assert not is_alive(build), "it went with its process"


def test_a_lost_process_of_an_idle_builder_is_replaced(make: Callable[..., GrammarBuilder]):
    builder = make()
    builder.request(GrammarSpec("regex", "a")).result(WAIT_S)
    first = builder.process.pid
    os.kill(first, signal.SIGKILL)
    grammar = builder.request(GrammarSpec("regex", "a*1")).result(WAIT_S)
    assert builder.process.pid not in (None, first) and not is_alive(first)
    assert tokens_of(SequenceMatcher(grammar, PAD_SIZE, [1]).fill()) == {3, 16}, "a or 1"


def test_what_nobody_waits_for_is_not_built(make: Callable[..., GrammarBuilder]):
    builder = make(num_processes=1)
    first, second = builder.request(SLOW), builder.request(SLOW)
    until(lambda: first.build.pid is not None)
    pid = first.build.pid
    queued = builder.request(GrammarSpec("regex", "b"))
    queued.give_up()
    first.give_up()
    assert is_alive(pid), "another one waits"
    second.give_up()
    until(lambda: not is_alive(pid))
    builder.request(GrammarSpec("regex", "a")).result(WAIT_S)
    assert queued.build.pid is None
    first.give_up()  # once more, as a request that is dropped after its end


def test_builds_wait_for_their_turn(make: Callable[..., GrammarBuilder]):
    builder = make(num_processes=1, timeout_s=1.0)
    hanging = [builder.request(SLOW), builder.request(GrammarSpec("ebnf", SLOW.source + ' | "z"'))]
    good = builder.request(GrammarSpec("regex", "a"))
    good.result(WAIT_S)
    assert all(ticket.done() for ticket in hanging), "time counts from a build's start, not from its request"


def test_close_ends_everything(make: Callable[..., GrammarBuilder]):
    builder = make()
    ticket, grammar = builder.request(SLOW), builder.request(GrammarSpec("regex", "ab")).result(WAIT_S)
    until(lambda: ticket.build.pid is not None)
    pids = builder.process.pid, ticket.build.pid
    start = time.monotonic()
    builder.close()
    assert time.monotonic() - start < 5
    until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(GrammarError, match="the engine is closed"):
        ticket.result(WAIT_S)
    with pytest.raises(GrammarError, match="the engine is closed"):
        builder.request(GrammarSpec("regex", "b")).result(WAIT_S)
    assert SequenceMatcher(grammar, PAD_SIZE, [1]).accept(3), "what was handed out stays"


def test_a_vocabulary_that_cannot_be_made_is_every_requests_error():
    def fail() -> Vocabulary:
        raise ValueError("tokens have no bytes of their own")

    builder = GrammarBuilder(fail, limits(), 0)
    for _ in range(2):
        with pytest.raises(GrammarError, match="cannot work here: tokens have no bytes"):
            builder.request(GrammarSpec("regex", "a")).result(WAIT_S)
    assert builder.process.pid is None
    builder.close()


# A program without a guard around its code: a process that imported it again would begin again.
PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
from deepinfer.structured_output.builder import BuildLimits, GrammarBuilder
from deepinfer.structured_output.request import GrammarSpec
from tests.support.so_vocabulary import VOCABULARY

print("begins", flush=True)
builder = GrammarBuilder(lambda: VOCABULARY, BuildLimits(1, 60.0, 1 << 30), 0)
builder.request(GrammarSpec("regex", "a")).result(60)
text = "root ::= " + " | ".join(f'"{{"a" * (i % 31)}}{{i}}"' for i in range(14_000))
ticket = builder.request(GrammarSpec("ebnf", text))
while ticket.build.pid is None:
    time.sleep(0.01)
print(builder.process.pid, ticket.build.pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["", "os.kill(os.getpid(), 9)", "if os.fork(): os.kill(os.getpid(), 9)\ntime.sleep(20)"],
    ids=["end", "killed", "killed, and a fork lives on"],
)
def test_its_processes_end_with_the_program(tmp_path: Path, end: str):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT), end=end))
    process = subprocess.Popen(
        [sys.executable, str(program)], cwd=tmp_path, env=clean_env(), stdout=subprocess.PIPE, text=True
    )
    begins, pids = process.stdout.readline(), process.stdout.readline()
    assert begins == "begins\n"
    process.wait(WAIT_S)
    until(lambda: not any(is_alive(int(pid)) for pid in pids.split()))
    process.stdout.close()


def test_importing_the_engine_does_not_import_the_library():
    code = (
        "import sys, deepinfer, deepinfer.engine.llm_engine, deepinfer.structured_output.builder;"
        "print(*(name in sys.modules for name in ('xgrammar', 'transformers', 'tvm_ffi')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_env(), capture_output=True, text=True
    )
    assert result.stdout.split() == ["False"] * 3, result.stderr


def test_frames_come_in_any_pieces():
    sent = [({"op": "a", "n": [1, 2]}, b""), ({}, os.urandom(1000)), ({"text": "é\n"}, b"\x00")]
    data = b"".join(frame_bytes(*frame) for frame in sent)
    for size in (1, 2, 7, 100, len(data)):
        reader, found = FrameReader(), []
        for start in range(0, len(data), size):
            found += reader.feed(data[start : start + size])
        assert found == sent and reader.num_bytes == 0
