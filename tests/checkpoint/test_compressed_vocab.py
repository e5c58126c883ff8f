"""Compressed vocabulary: golden maps, the rule written with Python's own Unicode tables, and its edges."""

from __future__ import annotations

import json
import re
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from deepinfer.checkpoint.compressed_vocab import fold_vocabulary
from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.loader import load_tokenizer, open_checkpoint
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from tests.checkpoint.configs import edited, tiny_quant_config
from tests.support.paths import TINY_QUANT


def normalized(text: str) -> str:
    """The rule, without the tokenizers library."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


def test_golden_map(units) -> None:
    fold = load_tokenizer(open_checkpoint(TINY_QUANT)).compressed_vocab()
    assert (fold.size, fold.pad_id) == (2032, 2)
    assert fold.token_map.dtype == np.int32
    golden = units["engram/tiny-quant/token_map"].numpy()
    assert np.array_equal(fold.token_map, golden)


def test_every_token_by_the_rule(golden_model) -> None:
    tokenizer = load_tokenizer(open_checkpoint(golden_model.checkpoint))
    token_map, pad_id, size = tokenizer.compressed_vocab()
    classes: dict[str, int] = {}
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id])
        key = tokenizer.id_to_piece(token_id) if "\ufffd" in text else normalized(text) or text
        assert token_map[token_id] == classes.setdefault(key, len(classes)), (token_id, text)
    assert (
        size
        == len(classes)
        == json.loads((golden_model.checkpoint / "config.json").read_text())["text_config"][
            "engram_compressed_vocab_size"
        ]
    )
    assert pad_id == token_map[2] == 2


def test_what_falls_together() -> None:
    """Byte-level pieces: Ġ is a blank, Ċ a line feed; lone bytes stay apart."""
    words = [
        "<s>",
        "</s>",
        "<p>",
        "a",
        "A",
        "Ġa",
        "ĠA",
        "aĠ",
        "Ã¡",
        "b",
        "Ġ",
        "Ċ",
        "ĠĊ",
        "ĉ",
        "Ã",
        "¡",
        "ï½ģ",
        "Ì",
        "Ìģ",
    ]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>")
    )
    tokenizer.decoder = decoders.ByteLevel()
    fold = fold_vocabulary(tokenizer, len(words) + 3, 2)
    by_word = dict(zip(words, fold.token_map.tolist()))
    letters = ["a", "A", "Ġa", "ĠA", "aĠ", "Ã¡", "ï½ģ"]  # á and the full-width a among them
    assert {by_word[word] for word in letters} == {3}
    assert by_word["b"] == 4
    assert {by_word[word] for word in ("Ġ", "Ċ", "ĠĊ", "ĉ")} == {
        5
    }  # a run of blanks is one blank, not nothing
    assert len({by_word["Ã"], by_word["¡"], by_word["Ì"]} | {0, 1, 2, 3, 4, 5}) == 9
    assert by_word["Ìģ"] not in (3, 4, 5)  # a lone accent folds to nothing, so it stands for itself
    assert fold.token_map[len(words) :].tolist() == [2, 2, 2]
    assert fold.size == len(set(by_word.values()))


def test_another_size_is_refused() -> None:
    config = DeepseekV41Config.from_dict(
        edited(tiny_quant_config(), text_config__engram_compressed_vocab_size=2033)
    )
    from deepinfer.checkpoint import tokenizer as tokenizer_module

    tokenizer = tokenizer_module.load_tokenizer(TINY_QUANT, config)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json.*2032 classes.*engram_compressed_vocab_size is 2033"
    ):
        tokenizer.compressed_vocab()
