"""Engines that nobody closes: the garbage collector takes them, whatever was going on."""

from __future__ import annotations

from tests.support.paths import V41_TINY
from tests.support.process import run_python

# An iterator that nobody finishes keeps a step in flight, whose end its clean-up waits for.
PROGRAM = f"""
import gc, threading
from deepinfer import LLM, SamplingParams, Settings
def leave():
    settings = Settings(use_async_scheduling=IS_ASYNC)
    llm = LLM({str(V41_TINY)!r}, settings=settings, max_num_seqs=4, max_model_len=256)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 100)]
    results = llm.generate_iter([[20, 30], [40]], params)
    assert next(results)[0] == 0
    llm.cycle = [llm, results]  # only the collector can end this
for _ in range(2):
    leave()
    gc.collect()
threads = [thread for thread in threading.enumerate() if thread.name.startswith("deepinfer")]
for thread in threads:
    thread.join(30)
print([thread.name for thread in threads if thread.is_alive()])
leave()  # and one that is there when the interpreter ends
"""


def test_a_step_in_flight_hangs_neither_the_collector_nor_the_exit():
    for is_async in (True, False):
        assert run_python(PROGRAM.replace("IS_ASYNC", str(is_async))) == "[]\n"
