"""Tokenizer: text to ids and back under the checkpoint's policy, prompt formats, compressed vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from deepinfer.checkpoint.chat_template import JinjaFormat, Message, RecipeFormat, check_messages
from deepinfer.checkpoint.compressed_vocab import CompressedVocab, fold_vocabulary
from deepinfer.checkpoint.errors import CheckpointError, ConfigError

# What the policy "release" demands of a tokenizer, by id.
_RELEASE_TOKENS = {
    "bos_token": (0, "<｜begin▁of▁sentence｜>"),
    "eos_token": (1, "<｜end▁of▁sentence｜>"),
    "pad_token": (2, "<｜▁pad▁｜>"),
}


class TokenizerConfig(Protocol):
    """What a tokenizer needs to know of its model."""

    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    tokenizer_compatibility: str
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    dspark_noise_token_id: int
    num_nextn_predict_layers: int


def load_tokenizer(path: str | Path, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Args:
        path: directory with `tokenizer.json` and, if need be, `tokenizer_config.json`, `chat_template.jinja`.
        config: the model's configuration.

    Raises:
        CheckpointError: a file is missing or broken, or the tokenizer does not fit the model or the policy.
    """
    path = Path(path)
    options: dict[str, Any] = {}
    if (path / "tokenizer_config.json").is_file():
        options = _read_json(path / "tokenizer_config.json")
    if (path / "chat_template.jinja").is_file():
        options["chat_template"] = _read_text(path / "chat_template.jinja")
    return Tokenizer(path / "tokenizer.json", options, config)


class Tokenizer:
    """A checkpoint's tokenizer. Its vocabulary never changes.

    Under the policy "release" the begin token is id 0 and always added, end is 1 and pad is 2. Under "native"
    the three tokens and whether begin and end are added are what `tokenizer_config.json` says.

    Attributes:
        bos_token_id, eos_token_id, pad_token_id: begin, end and pad.
        adds_bos, adds_eos: what `encode` adds.
        undecodable_ids: ids below the model's vocabulary size that stand for no token, ascending.
        internal_ids: ids with a meaning inside the engine only (image place, draft noise), ascending.
    """

    def __init__(self, file: Path, options: dict[str, Any], config: TokenizerConfig):
        self._file = file
        self._json = _read_text(file)
        self._config = config
        self._tokenizer = _parse(self._json, file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._check_vocabulary()
        if config.tokenizer_compatibility == "release":
            self._check_release()
            ids = {name: token_id for name, (token_id, _) in _RELEASE_TOKENS.items()}
            self.adds_bos, self.adds_eos = True, False
        else:
            ids = {name: self._native_id(name, options) for name in _RELEASE_TOKENS}
            self.adds_bos = bool(options.get("add_bos_token", False))
            self.adds_eos = bool(options.get("add_eos_token", False))
        self.bos_token_id, self.eos_token_id, self.pad_token_id = ids.values()
        self._chat_template = _default_template(options.get("chat_template"))
        internal = {config.image_token_id}
        if config.num_nextn_predict_layers:
            internal.add(config.dspark_noise_token_id)
        self.internal_ids = tuple(sorted(internal))
        self.undecodable_ids = tuple(
            token_id for token_id in range(config.vocab_size) if self._tokenizer.id_to_token(token_id) is None
        )

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included; the model's vocabulary may be larger."""
        return len(self)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's object, for uses that this class does not cover; it must not be changed."""
        return self._tokenizer

    @property
    def tokenizer_json(self) -> str:
        """Content of `tokenizer.json`."""
        return self._json

    @property
    def bos_token(self) -> str:
        """Spelling of the begin token."""
        return self._tokenizer.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """Spelling of the end token."""
        return self._tokenizer.id_to_token(self.eos_token_id)

    @property
    def pad_token(self) -> str:
        """Spelling of the pad token."""
        return self._tokenizer.id_to_token(self.pad_token_id)

    @cached_property
    def all_special_ids(self) -> tuple[int, ...]:
        """Ids that `decode(skip_special_tokens=True)` leaves out, ascending."""
        added = self._tokenizer.get_added_tokens_decoder()
        return tuple(sorted(token_id for token_id, token in added.items() if token.special))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; spelled-out special tokens become their ids.

        Args:
            text: any string without lone surrogates.
            add_special_tokens: add what the policy adds; a text that begins with the begin token, as chat
                prompts do, gets no second one.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._finish(encoding.ids, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of several texts."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [self._finish(encoding.ids, add_special_tokens) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; ids that stand for no token give no text.

        Args:
            token_ids: ids in [0, model vocabulary).
            skip_special_tokens: leave out special tokens.
        """
        return self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token_id: int) -> str | None:
        """The vocabulary's string of an id, bytes spelled as byte-level characters; None without a token."""
        return self._tokenizer.id_to_token(token_id)

    def piece_to_id(self, piece: str) -> int | None:
        """Id of a vocabulary string, None when there is none."""
        return self._tokenizer.token_to_id(piece)

    def get_vocab(self) -> dict[str, int]:
        """Vocabulary string -> id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """The prompt of a conversation, in the checkpoint's own format.

        A checkpoint with a Jinja chat template uses it; else the release's format, which needs the
        package `deepseek-recipe` (the extra `deepinfer[chat]`).

        Args:
            messages: objects with "role" and "content".
            tokenize: ids when True, text when False.
            options: passed to the format; see `JinjaFormat.render` and `RecipeFormat.encode`.

        Raises:
            ValueError: the messages are not a conversation that the format can express.
            ImportError: the package is missing.
        """
        check_messages(messages)
        if isinstance(self._chat_format, RecipeFormat):
            call = self._chat_format.encode if tokenize else self._chat_format.render
            return call(messages, **options)
        text = self._chat_format.render(messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def compressed_vocab(self) -> CompressedVocab:
        """The fold of token ids onto classes that n-gram hashing uses.

        Raises:
            CheckpointError: the number of classes is not the one that the model was built with.
        """
        return self._compressed_vocab

    @cached_property
    def _compressed_vocab(self) -> CompressedVocab:
        fold = fold_vocabulary(self._tokenizer, self._config.vocab_size, self._config.engram_pad_token_id)
        if fold.size != self._config.engram_compressed_vocab_size:
            raise CheckpointError(
                f"its vocabulary folds to {fold.size} classes, the configuration's "
                f"engram_compressed_vocab_size is {self._config.engram_compressed_vocab_size}: "
                "this is not the tokenizer that the model was made with",
                file=str(self._file),
            )
        return fold

    @cached_property
    def _chat_format(self) -> JinjaFormat | RecipeFormat:
        if self._chat_template is None:
            image_token = self._tokenizer.id_to_token(self._config.image_token_id)
            return RecipeFormat(self._json, image_token or "<｜deepseek_image｜>")
        names = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        return JinjaFormat(self._chat_template, names)

    def _finish(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        """Add what the policy adds."""
        if not add_special_tokens:
            return ids
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        if self.adds_eos:
            ids = [*ids, self.eos_token_id]
        return ids

    def _check_vocabulary(self) -> None:
        """Every id must be below the model's vocabulary size, and ids must have no holes."""
        ids = self.get_vocab().values()
        if max(ids, default=0) >= self._config.vocab_size:
            raise CheckpointError(
                f"token id {max(ids)} is not below the model's vocab_size={self._config.vocab_size}",
                file=str(self._file),
            )
        if len(set(ids)) != max(ids, default=-1) + 1:
            hole = next(i for i in range(len(ids)) if self._tokenizer.id_to_token(i) is None)
            raise CheckpointError(f"the vocabulary has no token with id {hole}", file=str(self._file))

    def _check_release(self) -> None:
        """The policy "release" fixes three tokens by id and spelling."""
        for name, (token_id, spelling) in _RELEASE_TOKENS.items():
            if getattr(self._config, f"{name}_id") != token_id:
                raise ConfigError(
                    f"{name}_id",
                    f"{getattr(self._config, f'{name}_id')} is not supported; supported: {token_id} "
                    "under tokenizer_compatibility 'release' (native: what tokenizer_config.json says)",
                )
            if self._tokenizer.id_to_token(token_id) != spelling:
                raise CheckpointError(
                    f"token {token_id} is {self._tokenizer.id_to_token(token_id)!r}, must be {spelling!r} "
                    "under tokenizer_compatibility 'release'",
                    file=str(self._file),
                )

    def _native_id(self, name: str, options: dict[str, Any]) -> int:
        """Id of a special token that `tokenizer_config.json` names, else the one of `config.json`."""
        token = options.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return getattr(self._config, f"{name}_id")
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise CheckpointError(
                f"{name} {token!r} of tokenizer_config.json is not in the vocabulary", file=str(self._file)
            )
        return token_id


def _default_template(template: Any) -> str | None:
    """The template named "default" where a file holds several."""
    if isinstance(template, list):
        return next((item["template"] for item in template if item.get("name") == "default"), None)
    return template


def _parse(text: str, file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"is not a tokenizer file: {error}", file=str(file)) from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", file=str(file)) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"is not valid JSON: {error}", file=str(file)) from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", file=str(file))
    return value
