"""Results: plain values, log-probability dictionaries, short texts of long records."""

from __future__ import annotations

import copy
import json
import pickle

from deepinfer.outputs import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    Logprob,
    RequestError,
    RequestMetrics,
    RequestOutput,
    position_logprobs,
)


def test_reasons_are_strings():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error", "handed_off"]
    assert FinishReason.STOP == "stop" and json.dumps(FinishReason.LENGTH) == '"length"'
    assert {"invalid_request", "too_long", "numerics", "grammar"} <= {str(kind) for kind in ErrorKind}


def test_position_with_the_token_outside_the_best():
    found = position_logprobs(9, -4.5, 12, [3, 1], [-0.1, -2.0], str)
    assert list(found) == [9, 3, 1]
    assert found[9] == Logprob(-4.5, 12, "9")
    assert found[3] == Logprob(-0.1, 1, "3") and found[1] == Logprob(-2.0, 2, "1")


def test_position_with_the_token_among_the_best():
    found = position_logprobs(1, -2.0, 2, [3, 1], [-0.1, -2.0])
    assert list(found) == [1, 3]
    assert found[1] == Logprob(-2.0, 2, None)


def test_impossible_alternatives_are_left_out():
    found = position_logprobs(4, -9999.0, 5, [3, 1], [0.0, -9999.0])
    assert found == {4: Logprob(-9999.0, 5), 3: Logprob(0.0, 1)}


def test_records_do_not_share_their_lists():
    one, two = CompletionOutput(0), CompletionOutput(1)
    one.token_ids.append(3)
    assert two.token_ids == []
    assert RequestOutput("a", None, [], []).metrics is not RequestOutput("b", None, [], []).metrics


def test_finished_and_error():
    error = RequestError(ErrorKind.NUMERICS, "the model produced NaN logits")
    good = CompletionOutput(0, "hi", [5], finish_reason=FinishReason.STOP)
    bad = CompletionOutput(1, finish_reason=FinishReason.ERROR, error=error)
    assert good.finished and not CompletionOutput(0).finished
    assert RequestOutput("r", "p", [1], [good]).error is None
    assert RequestOutput("r", "p", [1], [good, bad]).error is error
    assert str(error) == "numerics: the model produced NaN logits"


def test_repr_is_short_and_complete():
    output = CompletionOutput(0, "a" * 500, list(range(1000)), finish_reason=FinishReason.LENGTH)
    text = repr(RequestOutput("7", "prompt", [1, 2], [output], finished=True))
    assert len(text) < 500
    assert "finish_reason='length'" in text and "(1000 items)" in text and "(500 characters)" in text
    assert "request_id='7'" in text and "prompt_token_ids=[1, 2]" in text
    assert "error" not in text and "metrics" not in text
    assert "num_preemptions=2" in repr(
        RequestOutput("7", None, [], [], metrics=RequestMetrics(num_preemptions=2))
    )


def test_values_can_be_copied_and_pickled():
    output = CompletionOutput(0, "x", [1], -0.5, [-0.5], [position_logprobs(1, -0.5, 1, [], [])], "stop", "x")
    request = RequestOutput(
        "r", "p", [1], [output], True, [-1.0], [None, {}], RequestMetrics(arrival_time=3.0)
    )
    assert pickle.loads(pickle.dumps(request)) == request == copy.deepcopy(request)
