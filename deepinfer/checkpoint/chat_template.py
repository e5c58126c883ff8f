"""Prompt formats of a conversation: the checkpoint's Jinja template, or the release's `deepseek-recipe`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]  # "role" and "content", as chat APIs spell them

_RECIPE_MODEL = "DeepSeek-V4.1-Flash"


def check_messages(messages: Sequence[Message]) -> None:
    """ValueError, naming the place, unless `messages` is a list of role and content objects."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("a conversation needs at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}] must be an object with a `role`, got {message!r}")


class JinjaFormat:
    """A Jinja chat template as tokenizer files carry it.

    Args:
        template: the source.
        special_tokens: names such as "bos_token" and their spelling, as the template may use them.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]):
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        self._template = environment.from_string(template)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt as text, special tokens spelled out.

        Args:
            messages: content is text or a list of text parts, which are joined by a blank line.
            variables: passed to the template; `add_generation_prompt` is True and `tools` null unless given.
        """
        from jinja2 import TemplateError

        plain = [{**message, "content": _text(message, place)} for place, message in enumerate(messages)]
        values = {"add_generation_prompt": True, "tools": None, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=plain, **values)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error


class RecipeFormat:
    """The release's prompt format, by the package `deepseek-recipe`.

    Args:
        tokenizer_json: content of `tokenizer.json`.
        image_token: the spelling of the image token.
    """

    def __init__(self, tokenizer_json: str, image_token: str):
        try:
            import deepseek_recipe
        except ImportError as error:
            raise ImportError(
                "the release's chat format needs the package deepseek-recipe: pip install 'deepinfer[chat]'"
            ) from error
        self._recipe = deepseek_recipe
        self._special_tokens = deepseek_recipe.SpecialTokens(image=image_token)
        tokenizer = deepseek_recipe.Tokenizer.from_str(tokenizer_json)
        encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(self._special_tokens)
        self._encoding = encoding.with_tokenizer(tokenizer)

    def render(self, messages: Sequence[Message], *, thinking: bool = False, **fields: Any) -> str:
        """The prompt as text; arguments as for `encode`."""
        return self._encoding.render_conversation(self._conversation(messages, thinking, fields)).prompt

    def encode(self, messages: Sequence[Message], *, thinking: bool = False, **fields: Any) -> list[int]:
        """The prompt as ids; text of users is encoded without special tokens.

        Args:
            messages: as in the Chat Completions API.
            thinking: whether the answer begins with reasoning.
            fields: further fields of a Chat Completions request, such as `reasoning_effort` or `tools`.
        """
        return self._encoding.encode(self._conversation(messages, thinking, fields))

    def _conversation(self, messages: Sequence[Message], thinking: bool, fields: Mapping[str, Any]) -> Any:
        body = {
            "model": _RECIPE_MODEL,
            "messages": [dict(message) for message in messages],
            "thinking": {"type": "enabled" if thinking else "disabled"},
            **fields,
        }
        options = self._recipe.ConversionOptions().with_special_tokens(self._special_tokens)
        try:
            conversation = self._recipe.ChatCompletionRequest(body).convert(options).conversation
        except self._recipe.ConversionError as error:
            raise ValueError(f"the conversation cannot be converted: {error}") from error
        if self._encoding.render_conversation(conversation).image_sources:
            raise ValueError("the conversation holds images; only text is supported")
        return conversation


def _text(message: Message, place: int) -> str:
    """Content of a message as one text."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"
        for part in content
    ):
        return "\n\n".join(part["text"] for part in content)
    raise ValueError(f"messages[{place}]: content must be text or a list of text parts, got {content!r}")


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without escapes for HTML, which Jinja's own filter would add."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
