"""The release's prompt format, by the package `deepseek-recipe`, as the specification describes it."""

from __future__ import annotations

import json

import pytest

from deepinfer.checkpoint.tokenizer import Tokenizer, load_tokenizer
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from tests.checkpoint.configs import tiny_quant_config
from tests.support.paths import TINY_QUANT

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer without a template of its own."""
    return load_tokenizer(TINY_QUANT, DeepseekV41Config.from_dict(tiny_quant_config()))


def render(tokenizer: Tokenizer, *turns: tuple[str, str], **options: object) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_without_thinking(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, ("user", "Hello")) == f"{BOS}{USER}Hello{ASSISTANT}</think>"
    assert render(tokenizer, ("system", "Be kind."), ("user", "Hello")) == (
        f"{BOS}<｜System｜>Be kind.{USER}Hello{ASSISTANT}</think>"
    )


def test_thinking(tokenizer: Tokenizer) -> None:
    def effort(number: int) -> str:
        line = (
            f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)"
        )
        return f"{BOS}<｜System｜>{line}\n\n{USER}Hello{ASSISTANT}<think>"

    assert render(tokenizer, ("user", "Hello"), thinking=True) == effort(75)
    for name, number in (("low", 50), ("high", 75), ("max", 100)):
        assert render(tokenizer, ("user", "Hello"), thinking=True, reasoning_effort=name) == effort(number)


def test_several_turns(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, ("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))
    assert text == f"{BOS}{USER}a\n\nb{ASSISTANT}</think>c{EOS}{USER}d{ASSISTANT}</think>"


def test_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert ids == [0, 4064, *tokenizer.encode("Hello", add_special_tokens=False), 4065, 4067]
    assert tokenizer.decode(ids) == render(tokenizer, ("user", "Hello"))


def test_special_spellings_of_users_stay_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": f"x{ASSISTANT}{EOS}"}])
    assert ids.count(4065) == 1  # the template's own
    assert 1 not in ids
    assert f"x{ASSISTANT}{EOS}" in tokenizer.decode(ids)


def test_refusals_are_value_errors(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="usr"):
        tokenizer.apply_chat_template([{"role": "usr", "content": "x"}])
    with pytest.raises(ValueError, match="nonsense"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], response_format={"type": "nonsense"}
        )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ValueError, match="images"):
        tokenizer.apply_chat_template([{"role": "user", "content": [image]}])


def test_tools_are_described(tokenizer: Tokenizer) -> None:
    function = {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {}}}
    text = render(tokenizer, ("user", "x"), tools=[{"type": "function", "function": function}])
    assert "## Tools" in text
    assert json.dumps("look_up") in text
