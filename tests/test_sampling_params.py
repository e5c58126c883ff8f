"""SamplingParams: defaults, every check and its words, aliases, sharing."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from deepinfer.sampling_params import SamplingParams

BIG = 2**31


def test_defaults():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, -1, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.logprobs is None and params.prompt_logprobs is None
    assert params.stop == () and params.stop_token_ids == () and params.logit_bias == ()
    assert params.detokenize and params.skip_special_tokens and not params.ignore_eos
    assert not params.is_greedy and not params.has_penalties and not params.has_structured_output
    assert repr(params) == "SamplingParams()"


GOOD = [
    ("n", 3, 3),
    ("temperature", 0, 0.0),
    ("temperature", 9.9e-6, 0.0),
    ("temperature", 1e-5, 1e-5),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", 1e-9, 1e-9),
    ("top_p", 1, 1.0),
    ("top_k", 1, 1),
    ("top_k", BIG - 1, BIG - 1),
    ("top_k", np.int64(7), 7),
    ("min_p", 1.0, 1.0),
    ("repetition_penalty", 0.5, 0.5),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2.0, 2.0),
    ("logit_bias", {5: 1, 3: -math.inf}, ((3, -math.inf), (5, 1.0))),
    ("logit_bias", [(2, 0.5)], ((2, 0.5),)),
    ("logit_bias", {}, ()),
    ("allowed_token_ids", [4, 1, 4], (1, 4)),
    ("allowed_token_ids", np.array([2, 0]), (0, 2)),
    ("seed", 2**64 + 3, 3),
    ("seed", -1, 2**64 - 1),
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("min_tokens", 16, 16),
    ("eos_id", 0, 0),
    ("first_n_token_no_eos", 5, 5),
    ("stop", "END", ("END",)),
    ("stop", ["a", "b", "a"], ("a", "b")),
    ("stop", [], ()),
    ("stop_token_ids", [7, 3, 7], (7, 3)),
    ("logprobs", 0, 0),
    ("logprobs", 1000, 1000),
    ("logprobs", True, 0),
    ("logprobs", False, None),
    ("prompt_logprobs", True, 0),
    ("prompt_logprobs", 5, 5),
    ("golden_token_ids", [-1, 3], (-1, 3)),
    ("golden_token_ids", None, ()),
    ("ignore_eos", 1, True),
    ("verification", "ratio", "ratio"),
    ("verification", "coupled", "coupled"),
    ("detokenize", np.bool_(False), False),
]


@pytest.mark.parametrize(("name", "value", "kept"), GOOD)
def test_good_values(name, value, kept):
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept
    assert type(found) is type(kept)


BAD = [
    ("n", 0, ValueError, "n must be between 1"),
    ("n", True, TypeError, "got True"),
    ("n", 1.0, TypeError, "must be an integer"),
    ("temperature", -0.1, ValueError, "got -0.1"),
    ("temperature", math.nan, ValueError, "got nan"),
    ("temperature", math.inf, ValueError, "got inf"),
    ("temperature", "1", TypeError, "must be a number"),
    ("temperature", True, TypeError, "must be a number"),
    ("temperature", None, TypeError, "must be a number"),
    ("top_p", 0, ValueError, "1.0 switches it off"),
    ("top_p", 1.001, ValueError, "got 1.001"),
    ("top_p", math.nan, ValueError, "nan"),
    ("top_k", 0, ValueError, "-1 \\(off\\) or at least 1, got 0"),
    ("top_k", -2, ValueError, "-1 switches it off"),
    ("top_k", BIG, ValueError, str(BIG - 1)),
    ("top_k", 2.0, TypeError, "integer"),
    ("top_k", True, TypeError, "integer"),
    ("min_p", -0.1, ValueError, "min_p"),
    ("min_p", 1.1, ValueError, "min_p"),
    ("repetition_penalty", 0, ValueError, "1.0 switches it off"),
    ("repetition_penalty", -1, ValueError, "repetition_penalty"),
    ("presence_penalty", 2.1, ValueError, "\\[-2, 2\\]"),
    ("frequency_penalty", -2.1, ValueError, "\\[-2, 2\\]"),
    ("logit_bias", {1: math.inf}, ValueError, "logit_bias\\[1\\]"),
    ("logit_bias", {1: math.nan}, ValueError, "nan"),
    ("logit_bias", {-1: 0.0}, ValueError, "token id"),
    ("logit_bias", {"5": 1.0}, TypeError, "token id"),
    ("logit_bias", 3, TypeError, "dict of token id"),
    ("logit_bias", [3], TypeError, "element 3"),
    ("logit_bias", [(1, 1.0), (1, 2.0)], ValueError, "twice"),
    ("allowed_token_ids", [], ValueError, "None allows every token"),
    ("allowed_token_ids", [1, -4], ValueError, "allowed_token_ids\\[1\\]"),
    ("allowed_token_ids", "12", TypeError, "list of integers"),
    ("allowed_token_ids", 7, TypeError, "list of integers"),
    ("seed", 1.5, TypeError, "seed"),
    ("seed", "x", TypeError, "seed"),
    ("seed", True, TypeError, "seed"),
    ("max_tokens", 0, ValueError, "None goes on to the end"),
    ("max_tokens", -5, ValueError, "got -5"),
    ("max_tokens", True, TypeError, "integer"),
    ("max_tokens", BIG, ValueError, "max_tokens"),
    ("min_tokens", -1, ValueError, "min_tokens"),
    ("min_tokens", 17, ValueError, "min_tokens \\(17\\) .* max_tokens \\(16\\)"),
    ("eos_id", -1, ValueError, "eos_id"),
    ("first_n_token_no_eos", -1, ValueError, "first_n_token_no_eos"),
    ("stop", "", ValueError, "empty"),
    ("stop", ["a", ""], ValueError, "empty"),
    ("stop", ["a", 3], TypeError, "element 3"),
    ("stop", b"a", TypeError, "bytes"),
    ("stop", 5, TypeError, "int"),
    ("stop_token_ids", [-1], ValueError, "stop_token_ids\\[0\\]"),
    ("stop_token_ids", [1.0], TypeError, "stop_token_ids\\[0\\]"),
    ("stop_token_ids", [True], TypeError, "stop_token_ids\\[0\\]"),
    ("logprobs", -1, ValueError, "between 0 and 1000"),
    ("logprobs", 1001, ValueError, "between 0 and 1000"),
    ("logprobs", 2.0, TypeError, "integer"),
    ("prompt_logprobs", 1001, ValueError, "prompt_logprobs"),
    ("top_logprobs", True, TypeError, "top_logprobs"),
    ("golden_token_ids", [-2], ValueError, "golden_token_ids\\[0\\]"),
    ("verification", "exact", ValueError, "'exact': choose one of coupled, ratio"),
    ("verification", True, ValueError, "choose one of"),
    ("ignore_eos", "yes", TypeError, "True or False"),
    ("ignore_eos", 2, TypeError, "True or False"),
    ("include_stop_str_in_output", None, TypeError, "True or False"),
    ("so_args", "json", TypeError, "dict"),
    ("so_args", {"schema_type": "json"}, ValueError, "'schema'"),
    ("structured_outputs", 3, TypeError, "StructuredOutputsParams"),
    ("so_args", {"schema": "", "schema_type": "json", "serialized": ""}, ValueError, "serialized"),
    ("so_args", {"schema": "", "schema_type": "json", "bound_token_ids": 1}, ValueError, "'bound_token_id'"),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), BAD)
def test_bad_values(name, value, error, words):
    with pytest.raises(error, match=words):
        SamplingParams(**{name: value})


def test_greedy_switches_truncation_off():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.2, seed=4)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, -1, 0.0)
    assert params == SamplingParams(temperature=0, seed=4)


@pytest.mark.parametrize(("given", "nearest"), [
    ("temprature", "temperature"),
    ("max_token", "max_tokens"),
    ("topp", "top_p"),
    ("stop_tokens", "stop_token_ids"),
    ("seqseed", "seq_seed"),
])  # fmt: skip
def test_unknown_keyword_names_the_nearest(given, nearest):
    with pytest.raises(TypeError, match=f"{given!r} \\(did you mean {nearest!r}\\?\\)"):
        SamplingParams(**{given: 1})


def test_unknown_keyword_without_a_neighbour_lists_the_options():
    with pytest.raises(TypeError, match="'zzzz'; it knows n, temperature"):
        SamplingParams(zzzz=1)


def test_seed_and_its_alias():
    assert SamplingParams(seq_seed=9).seed == 9
    assert SamplingParams(seed=9, seq_seed=2**64 + 9).seq_seed == 9
    with pytest.raises(ValueError, match="same option"):
        SamplingParams(seed=1, seq_seed=2)


@pytest.mark.parametrize(("options", "logprobs", "top"), [
    ({}, None, 0),
    ({"top_logprobs": 0}, None, 0),
    ({"top_logprobs": 4}, 4, 4),
    ({"logprobs": True, "top_logprobs": 4}, 4, 4),
    ({"logprobs": True, "top_logprobs": 0}, 0, 0),
    ({"logprobs": 4, "top_logprobs": 4}, 4, 4),
    ({"logprobs": 4, "top_logprobs": 0}, 4, 4),
    ({"logprobs": False, "top_logprobs": 0}, None, 0),
])  # fmt: skip
def test_logprobs_and_its_alias(options, logprobs, top):
    params = SamplingParams(**options)
    assert (params.logprobs, params.top_logprobs) == (logprobs, top)


def test_contradictions():
    with pytest.raises(ValueError, match="same option"):
        SamplingParams(logprobs=3, top_logprobs=4)
    with pytest.raises(ValueError, match="logprobs=False"):
        SamplingParams(logprobs=False, top_logprobs=4)
    with pytest.raises(ValueError, match="stop_token_ids instead"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(ValueError, match="not both"):
        SamplingParams(so_args={"schema_type": "regex", "schema": "a"}, structured_outputs=object())


def test_immutable_and_shared():
    params = SamplingParams(temperature=0.5, stop=["x"])
    with pytest.raises(FrozenInstanceError, match=r"clone\(temperature=\.\.\.\)"):
        params.temperature = 0.1
    with pytest.raises(FrozenInstanceError):
        params.unheard_of = 1
    with pytest.raises(FrozenInstanceError):
        del params.temperature
    assert copy.copy(params) is params and copy.deepcopy(params) is params and params.clone() is params
    assert {params: 1}[SamplingParams(temperature=0.5, stop="x")] == 1


def test_lists_are_copied():
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 2.0
    assert params.stop == ("a",) and params.logit_bias == ((1, 1.0),)
    so_args = {"schema_type": "json", "schema": "{}"}
    params = SamplingParams(so_args=so_args)
    so_args["schema"] = "other"
    assert params.so_args["schema"] == "{}" and params.has_structured_output
    with pytest.raises(TypeError):
        params.so_args["schema"] = "x"


EVERYTHING = SamplingParams(
    n=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
    frequency_penalty=0.3, logit_bias={1: 2.0}, allowed_token_ids=[1, 2], seed=7, max_tokens=9, min_tokens=2,
    ignore_eos=True, eos_id=3, first_n_token_no_eos=1, stop=["x"], stop_token_ids=[5],
    include_stop_str_in_output=True, logprobs=2, prompt_logprobs=1, golden_token_ids=[-1, 4],
    verification="ratio", skip_special_tokens=False, so_args={"schema_type": "json", "schema": "{}"},
)  # fmt: skip


def test_clone_and_pickle_keep_every_field():
    unchanged = {f.name for f in fields(EVERYTHING) if getattr(EVERYTHING, f.name) == f.default}
    assert unchanged == {"detokenize", "structured_outputs"}
    assert pickle.loads(pickle.dumps(EVERYTHING)) == EVERYTHING
    clone = EVERYTHING.clone(top_k=6)
    different = [f.name for f in fields(clone) if getattr(clone, f.name) != getattr(EVERYTHING, f.name)]
    assert different == ["top_k"]
    assert EVERYTHING.clone(seq_seed=8).seed == 8
    assert EVERYTHING.clone(top_logprobs=3).logprobs == 3
    with pytest.raises(ValueError, match="top_k"):
        EVERYTHING.clone(top_k=0)
    with pytest.raises(TypeError, match="did you mean 'top_k'"):
        EVERYTHING.clone(topk=0)


def test_repr_can_be_evaluated():
    params = EVERYTHING.clone(so_args=None)
    assert eval(repr(params)) == params
    assert repr(SamplingParams(top_k=3, seed=1)) == "SamplingParams(top_k=3, seed=1)"


def test_from_optional():
    assert SamplingParams.from_optional(temperature=None, top_k=None, seed=3) == SamplingParams(seed=3)


def test_every_field_is_documented():
    """The class is the documentation: a docstring literal follows each field."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(SamplingParams)).body[0].body
    for place, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            after = body[place + 1]
            assert isinstance(after, ast.Expr) and isinstance(after.value.value, str), node.target.id
