"""Compressed vocabulary: folds token ids onto classes of tokens that look alike, for Engram's hashes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import Regex, normalizers

_INCOMPLETE = "\ufffd"  # a decoded piece holds it when the piece is not whole UTF-8
_LONE_SPACE = "\ue000"  # stands for a lone space while both ends are stripped


class CompressedVocab(NamedTuple):
    """The fold.

    Attributes:
        token_map: [vocab] int32, token id -> class; classes are numbered by first appearance.
        pad_id: class of the pad token, which stands for places before the start and for image tokens.
        size: number of classes.
    """

    token_map: np.ndarray
    pad_id: int
    size: int


def fold_vocabulary(tokenizer: tokenizers.Tokenizer, vocab_size: int, pad_token_id: int) -> CompressedVocab:
    """Build the fold from a tokenizer to which nothing has been added.

    Two ids fall together when their texts agree after compatibility folding, without accents, case and runs
    of blanks; a piece that is not whole UTF-8 stands for itself.

    Args:
        tokenizer: the checkpoint's.
        vocab_size: entries of the result; ids that the tokenizer has no token for fold onto the pad token.
        pad_token_id: raw id of the pad token.
    """
    normalize = _normalizer().normalize_str
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[i] for i in range(num_tokens)], skip_special_tokens=False)
    classes: dict[str, int] = {}
    token_map = np.empty(vocab_size, dtype=np.int32)
    for token_id, text in enumerate(texts):
        if _INCOMPLETE in text:
            key = tokenizer.id_to_token(token_id)
        else:
            key = normalize(text) or text
        token_map[token_id] = classes.setdefault(key, len(classes))
    pad_id = int(token_map[pad_token_id])
    token_map[num_tokens:] = pad_id
    return CompressedVocab(token_map, pad_id, len(classes))


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
