"""Tokenizer: golden prompts, policies, round trips, refusals, and the bundled model's chat template."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint.errors import CheckpointError, ConfigError
from deepinfer.checkpoint.tokenizer import Tokenizer, load_tokenizer
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from tests.checkpoint.configs import edited, tiny_quant_config
from tests.support.paths import TINY_QUANT, V41_TINY

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  blanks \n\t\r\n",
    "naïve café 12345 ÀÉ",
    "你好，世界 カタカナ 😀👩‍👩‍👧",
    "\x00\x01\x7f \ufffd \ue000",
    "<think>x</think>",
]


def tokenizer_of(path: Path, **edits: Any) -> Tokenizer:
    config = json.loads((path / "config.json").read_text())
    return load_tokenizer(path, DeepseekV41Config.from_dict(edited(config, **edits)))


@pytest.fixture(scope="module")
def random_model() -> Tokenizer:
    return tokenizer_of(TINY_QUANT)


@pytest.fixture(scope="module")
def trained_model() -> Tokenizer:
    return tokenizer_of(V41_TINY)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Tokenizer]:
    """A tokenizer from changed copies of the random model's files."""

    def make(
        change: Callable[[dict[str, Any]], None] = lambda files: None,
        options: dict[str, Any] | None = None,
        **edits: Any,
    ) -> Tokenizer:
        content = json.loads((TINY_QUANT / "tokenizer.json").read_text())
        change(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        if options is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
        return load_tokenizer(tmp_path, DeepseekV41Config.from_dict(edited(tiny_quant_config(), **edits)))

    return make


def test_golden_prompts(golden_model) -> None:
    tokenizer = tokenizer_of(golden_model.checkpoint)
    prompts = [prompt for prompt in golden_model.json("prompts") if prompt["text"]]
    assert len(prompts) >= 4
    for prompt in prompts:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"], prompt["name"]
        assert tokenizer.decode(prompt["ids"]) == BOS + prompt["text"]
        assert tokenizer.decode(prompt["ids"][1:]) == prompt["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(random_model: Tokenizer, trained_model: Tokenizer, text: str) -> None:
    for tokenizer in (random_model, trained_model):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == [0, *ids]
        assert tokenizer.decode([0, *ids, 1, 2]) == f"{BOS}{text}{EOS}{tokenizer.pad_token}"
        assert max(ids, default=0) < len(tokenizer) == tokenizer.vocab_size == 4096


def test_batch_equals_one_by_one(trained_model: Tokenizer) -> None:
    for add in (False, True):
        assert trained_model.encode_batch(TEXTS, add) == [trained_model.encode(text, add) for text in TEXTS]


def test_special_tokens(trained_model: Tokenizer) -> None:
    assert (trained_model.bos_token_id, trained_model.eos_token_id, trained_model.pad_token_id) == (0, 1, 2)
    assert (trained_model.bos_token, trained_model.eos_token) == (BOS, EOS)
    assert trained_model.all_special_ids == tuple(range(16))
    ids = trained_model.encode(f"{BOS}<｜User｜>Hi")
    assert ids[:2] == [0, 3]
    assert ids.count(0) == 1  # the text has the begin token already
    assert trained_model.decode(ids, skip_special_tokens=True) == "Hi"
    assert trained_model.id_to_piece(3) == "<｜User｜>"
    assert trained_model.piece_to_id("<｜User｜>") == 3
    assert trained_model.piece_to_id("no such piece") is None
    assert trained_model.id_to_piece(4096) is None
    assert len(trained_model.get_vocab()) == 4096


def test_ids_with_a_meaning_inside_the_engine(random_model: Tokenizer, trained_model: Tokenizer) -> None:
    assert trained_model.internal_ids == (14, 15)
    assert random_model.internal_ids == (4076, 4080)
    assert random_model.undecodable_ids == trained_model.undecodable_ids == ()


def test_ids_beyond_the_tokenizer(changed: Callable[..., Tokenizer]) -> None:
    tokenizer = changed(text_config__vocab_size=4100)
    assert tokenizer.undecodable_ids == (4096, 4097, 4098, 4099)
    assert tokenizer.decode([4097]) == ""
    fold = tokenizer.compressed_vocab()
    assert fold.token_map.shape == (4100,)
    assert (fold.token_map[4096:] == fold.pad_id).all()


# Policies.


def test_release_policy_adds_begin(random_model: Tokenizer) -> None:
    """Though the file's `add_bos_token` is false."""
    assert json.loads((TINY_QUANT / "tokenizer_config.json").read_text())["add_bos_token"] is False
    assert random_model.adds_bos
    assert random_model.encode("x")[0] == 0


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": False}, [], []),
        ({}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ({"add_bos_token": True, "bos_token": "<think>"}, [4066], []),
        ({"add_eos_token": True, "eos_token": {"content": "</think>"}}, [], [4067]),
        (None, [], []),
    ],
)
def test_native_policy(
    changed: Callable[..., Tokenizer], options: Any, begin: list[int], end: list[int]
) -> None:
    tokenizer = changed(options=options, tokenizer_compatibility="native")
    plain = tokenizer.encode("some words", add_special_tokens=False)
    assert tokenizer.encode("some words") == begin + plain + end
    assert tokenizer.encode("") == begin + end
    assert tokenizer.bos_token_id == (begin or [0])[0]
    assert tokenizer.eos_token_id == (end or [1])[0]


def test_native_token_must_exist(changed: Callable[..., Tokenizer]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*eos_token '<gone>'"):
        changed(options={"eos_token": "<gone>"}, tokenizer_compatibility="native")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_release_policy_fixes_ids(changed: Callable[..., Tokenizer], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*7.*release"):
        changed(**{key: 7})
    assert changed(tokenizer_compatibility="native", **{key: 7}) is not None


def test_release_policy_fixes_spellings(changed: Callable[..., Tokenizer]) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["added_tokens"][1]["content"] = "<eos>"
        content["model"]["vocab"]["<eos>"] = content["model"]["vocab"].pop(EOS)

    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*token 1 is '<eos>'"):
        changed(rename)


def test_vocabulary_must_fit_the_model(changed: Callable[..., Tokenizer]) -> None:
    def add(content: dict[str, Any]) -> None:
        content["added_tokens"].append({**content["added_tokens"][-1], "id": 4096, "content": "<more>"})

    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*4096.*vocab_size=4096"):
        changed(add)
    assert len(changed(add, text_config__vocab_size=4097)) == 4097


def test_vocabulary_has_no_holes(changed: Callable[..., Tokenizer]) -> None:
    def leave_out(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        merged = {part for merge in content["model"]["merges"] for part in merge}
        piece = next(p for p, i in vocab.items() if i > 3000 and p not in merged)
        content["model"]["merges"] = [m for m in content["model"]["merges"] if "".join(m) != piece]
        del vocab[piece]

    with pytest.raises(CheckpointError, match=r"no token with id 3\d\d\d"):
        changed(leave_out)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY_QUANT / file, tmp_path / file)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(tmp_path, DeepseekV41Config.from_dict(tiny_quant_config()))
    assert error.value.file == str(tmp_path / name)
    assert name in str(error.value)


# Chat.


def test_chat_template_of_the_bundled_model(trained_model: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}],
        },
    ]
    text = trained_model.apply_chat_template(messages, tokenize=False)
    assert text == (
        f"{BOS}<｜System｜>Be kind.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}"
        "<｜User｜>Tell me\n\na story.<｜Assistant｜></think>"
    )
    ids = trained_model.apply_chat_template(messages)
    assert ids == trained_model.encode(text)
    assert trained_model.decode(ids) == text


def test_question_as_the_card_spells_it(trained_model: Tokenizer) -> None:
    ids = trained_model.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    question = trained_model.encode("What is the capital of France?", add_special_tokens=False)
    assert ids == [0, 3, *question, 4, 6]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("Hi", "list of messages"),
        ({"role": "user", "content": "x"}, "list of messages"),
        (["Hi"], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, {"role": 3}], r"messages\[1\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\].*content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], r"messages\[0\]"),
    ],
)
def test_chat_refusals(trained_model: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trained_model.apply_chat_template(messages)


def test_template_file_and_variables(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(V41_TINY / file, tmp_path / file)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}\n"
        "{{ bos_token }}{{ messages[0].content }}{{ extra | tojson }}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    config = DeepseekV41Config.from_dict(json.loads((V41_TINY / "config.json").read_text()))
    tokenizer = load_tokenizer(tmp_path, config)
    user = {"role": "user", "content": "Hi"}
    assert (
        tokenizer.apply_chat_template([user], tokenize=False, extra={"a": "<é>"}) == f'{BOS}Hi{{"a": "<é>"}}!'
    )
    assert (
        tokenizer.apply_chat_template([user], tokenize=False, extra=1, add_generation_prompt=False)
        == f"{BOS}Hi1"
    )
    with pytest.raises(ValueError, match="one message only"):
        tokenizer.apply_chat_template([user, user])


def test_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    shutil.copyfile(TINY_QUANT / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    tokenizer = load_tokenizer(tmp_path, DeepseekV41Config.from_dict(tiny_quant_config()))
    with pytest.raises(ValueError, match="chat template refuses"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(ImportError, match=r"deepinfer\[chat\]"):
        tokenizer_of(TINY_QUANT).apply_chat_template([{"role": "user", "content": "x"}])
