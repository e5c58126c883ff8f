"""Streaming detokenisation against one-shot decoding, the stop search against a search by characters."""

from __future__ import annotations

import random
import time

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models

from deepinfer.checkpoint.detokenizer import Detokenizer, StopHit, StopSearch
from deepinfer.checkpoint.token_text import (
    ByteFallbackStream,
    ByteLevelStream,
    TokenTable,
    WindowStream,
)
from tests.support.paths import TINY_QUANT, V41_TINY

REPLACEMENT = "\ufffd"
TEXTS = [
    "The capital of France is Paris.\n",
    "naïve café – “quotes” … and €100",
    "北京是中国的首都。日本語のテキスト",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 🙂🙃 and more",
    "עברית العربية हिन्दी ไทย",
    "\x00\x7f tabs\tand\r\nlines\u2028",
]


@pytest.fixture(scope="module", params=[TINY_QUANT, V41_TINY], ids=["tiny-quant", "v41-tiny"])
def bundled(request) -> tokenizers.Tokenizer:
    return Tokenizer.from_file(str(request.param / "tokenizer.json"))


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """A decoder as Llama's: spaces as a block, bytes for the rest, one leading space taken off."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁a", "b", "ing", "▁▁", "é", "字", "<0xZZ>", "<0x4>"]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def word_tokenizer(decoder) -> tokenizers.Tokenizer:
    words = ["<unk>", "</s>", "▁the", "▁cat", "sat", "##s", "▁on", "it", "'", "s", "ing", "."]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(words)}, "<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def random_ids(tokenizer: tokenizers.Tokenizer, count: int) -> list[int]:
    """Any ids, with stretches of single-byte tokens and of real text, and some that do not exist."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids: list[int] = []
    while len(ids) < count:
        kind = random.random()
        if kind < 0.3:
            ids += tokenizer.encode(random.choice(TEXTS), add_special_tokens=False).ids
        elif kind < 0.6:
            ids += [random.randrange(size) for _ in range(random.randrange(1, 6))]
        elif kind < 0.9:
            ids += [random.randrange(min(size, 300)) for _ in range(random.randrange(1, 8))]
        else:
            ids.append(random.choice([0, 1, 2, size, size + 1000]))
    start = random.randrange(len(ids) - count + 1)
    return ids[start : start + count]


def chunked(ids: list[int]) -> list[list[int]]:
    chunks = []
    while ids:
        length = random.choice([1, 1, 1, 2, 3, 7, 50])
        chunks.append(ids[:length])
        ids = ids[length:]
    return chunks


def without_unfinished(text: str, streamed: str) -> bool:
    """Whether `text` is `streamed` plus replacement characters of one unfinished character (1 to 3 bytes)."""
    rest = text[len(streamed) :]
    return text.startswith(streamed) and len(rest) <= 3 and set(rest) <= {REPLACEMENT}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_stream_equals_one_shot(bundled, skip_special_tokens):
    table = TokenTable(bundled)
    assert isinstance(table.stream(), ByteLevelStream)
    dropped = 0
    for _ in range(400):
        ids = random_ids(bundled, random.randrange(1, 80))
        output = Detokenizer(table, skip_special_tokens=skip_special_tokens)
        taken = []
        for chunk in chunked(ids):
            assert output.append(chunk) is None
            if random.random() < 0.7:
                taken.append(output.take())
            if random.random() < 0.1:
                assert output.text.startswith("".join(taken))
        output.finish()
        taken.append(output.take())
        one_shot = bundled.decode(ids, skip_special_tokens=skip_special_tokens)
        assert "".join(taken) == output.text
        assert without_unfinished(one_shot, output.text), (ids, one_shot, output.text)
        dropped += one_shot != output.text
    assert 0 < dropped < 200


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_never_shows_a_broken_character(bundled, text):
    ids = bundled.encode(text, add_special_tokens=False).ids
    output = Detokenizer(TokenTable(bundled))
    seen = ""
    for token_id in ids:
        output.append([token_id])
        seen += output.take()
        assert REPLACEMENT not in seen
        assert text.startswith(seen)
    assert seen == text


def test_split_characters_wait_for_their_bytes(bundled):
    table = TokenTable(bundled)
    single = {piece[0]: i for i, piece in reversed(list(enumerate(table._all_bytes))) if len(piece) == 1}
    output = Detokenizer(table)
    steps = []
    for byte in "a€🙂".encode():
        output.append([single[byte]])
        steps.append(output.take())
    assert steps == ["a", "", "", "€", "", "", "", "🙂"]
    output.append([single[0xE2], single[0x82]])
    output.finish()
    assert output.text == "a€🙂"


def test_a_continuation_of_the_prompt_shows_nothing_of_it(bundled):
    """The prompt ends inside a character: the rest of it is no text, and the prompt's bytes stay unseen."""
    table = TokenTable(bundled)
    single = {piece[0]: i for i, piece in reversed(list(enumerate(table._all_bytes))) if len(piece) == 1}
    output = Detokenizer(table)
    output.append([single["€".encode()[2]], single[ord("x")]])
    assert output.text == REPLACEMENT + "x"


def test_unknown_ids_have_no_text(bundled):
    output = Detokenizer(TokenTable(bundled))
    output.append([10**6, 2**31 - 1])
    output.finish()
    assert output.text == ""


def test_special_tokens(bundled):
    table = TokenTable(bundled)
    eos = bundled.token_to_id("<｜end▁of▁sentence｜>")
    word = bundled.encode("x", add_special_tokens=False).ids
    shown = Detokenizer(table, skip_special_tokens=False)
    shown.append([*word, eos, *word])
    assert shown.text == "x<｜end▁of▁sentence｜>x"
    hidden = Detokenizer(table)
    hidden.append([*word, eos, *word])
    assert hidden.text == "xx"


def test_text_of_the_stopping_token(bundled):
    table = TokenTable(bundled)
    ids = bundled.encode("one two", add_special_tokens=False).ids
    for include in (False, True):
        output = Detokenizer(table, include_stop=include)
        output.append(ids, ends_with_stop_token=True)
        output.finish()
        assert output.text == bundled.decode(ids if include else ids[:-1])
        searched = Detokenizer(table, include_stop=include, stop=["zzz"])
        searched.append(ids, ends_with_stop_token=True)
        searched.finish()
        assert searched.text == output.text


def test_byte_fallback_equals_one_shot():
    tokenizer = byte_fallback_tokenizer()
    table = TokenTable(tokenizer)
    assert isinstance(table.stream(), ByteFallbackStream)
    size = tokenizer.get_vocab_size()
    euro = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    finished = 0
    for round_number in range(600):
        ids: list[int] = []
        for _ in range(random.randrange(1, 12)):
            choices = [euro, euro[:2], [random.randrange(12)], [random.randrange(size)], [3], [size + 5]]
            ids += random.choice(choices)
        if round_number % 2:
            ids.append(5)
        output = Detokenizer(table)
        for chunk in chunked(ids):
            output.append(chunk)
        output.finish()
        one_shot = tokenizer.decode(ids)
        if round_number % 2:
            assert output.text == one_shot, ids
            finished += 1
        else:
            # An unfinished character makes the library spoil its whole run; here only it is dropped.
            cut = len(one_shot.rstrip(REPLACEMENT))
            assert output.text[:cut] == one_shot[:cut]
    assert finished == 300


def test_byte_fallback_drops_only_the_unfinished_character():
    tokenizer = byte_fallback_tokenizer()
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é€".encode()]
    output = Detokenizer(TokenTable(tokenizer))
    output.append(run[:-1])
    output.finish()
    assert output.text == "é"


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.WordPiece(prefix="##", cleanup=False)])
def test_other_decoders_equal_one_shot(decoder):
    tokenizer = word_tokenizer(decoder)
    table = TokenTable(tokenizer)
    assert isinstance(table.stream(), WindowStream)
    for _ in range(200):
        ids = [random.randrange(12) for _ in range(random.randrange(1, 30))]
        output = Detokenizer(table)
        for chunk in chunked(ids):
            output.append(chunk)
        output.finish()
        assert output.text == tokenizer.decode(ids), ids


def test_window_gives_up_waiting():
    """Bytes that never become a character are shown, so a window cannot grow without end."""
    tokenizer = byte_fallback_tokenizer()
    stream = WindowStream(tokenizer, True, frozenset())
    lonely = tokenizer.token_to_id("<0x80>")
    assert REPLACEMENT in stream.push([lonely] * 40)
    assert len(stream._window) < 40


def brute_stop(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Text before the stop, the stop string and the tokens kept, by looking at every character in turn."""
    text, count = "", 0
    for piece in pieces:
        count += 1
        for character in piece:
            text += character
            ending = [s for s in stops if text.endswith(s)] if count > min_tokens else []
            if ending:
                longest = max(ending, key=len)
                return text[: -len(longest)], longest, count
    return text, None, count


def test_search_equals_brute_force():
    """Small alphabets, so that stop strings overlap each other and themselves at every border."""
    hits = 0
    for _ in range(4000):
        alphabet = random.choice(["a", "ab", "abc", "ab€"])
        stops = [
            "".join(random.choices(alphabet, k=random.randrange(1, 6))) for _ in range(random.randrange(1, 4))
        ]
        pieces = ["".join(random.choices(alphabet, k=random.randrange(0, 5))) for _ in range(12)]
        min_tokens = random.choice([0, 0, 0, 3, 11, 12])
        expected, stop, count = brute_stop(pieces, stops, min_tokens)
        search = StopSearch(stops)
        text, found, used = "", None, 0
        for number, piece in enumerate(pieces):
            ready, found = search.push(piece, number >= min_tokens)
            text, used = text + ready, used + 1
            assert expected.startswith(text)  # nothing of the stop string was shown early
            if found is not None:
                break
        if found is None:
            text += search.finish()
        assert (text, found, used) == (expected, stop, count), (stops, pieces, min_tokens)
        hits += found is not None
    assert 1500 < hits < 3900


def test_nothing_is_held_without_need():
    search = StopSearch(["STOP", "TOE"])
    assert search.push("hello S") == ("hello ", None)
    assert search.push("T") == ("", None)
    assert search.push("OX") == ("STOX", None)
    assert search.push("TO") == ("", None)
    assert search.finish() == "TO"
    assert StopSearch(["ab", "xxxx"]).push("ab", may_stop=False) == ("ab", None)


def test_stops_inside_outputs(bundled):
    """Random outputs of the real tokenizers, cut at random places, with stop strings from their text."""
    table = TokenTable(bundled)
    special = {i for i, token in bundled.get_added_tokens_decoder().items() if token.special}
    hits = 0
    for _ in range(300):
        ids = [i for i in random_ids(bundled, 40) if i not in special]
        stream = table.stream()
        pieces = [stream.push([i]) for i in ids]
        text = "".join(pieces)
        stops = []
        for _ in range(random.randrange(1, 4)):
            start = random.randrange(len(text))
            stops.append(text[start : start + random.randrange(1, 9)])
        min_tokens = random.choice([0, 0, 10])
        include = random.random() < 0.5
        expected, stop, count = brute_stop(pieces, stops, min_tokens)
        output = Detokenizer(table, stop=stops, include_stop=include, min_tokens=min_tokens)
        hit, shown = None, ""
        for chunk in chunked(ids):
            hit = output.append(chunk)
            shown += output.take()
            if hit:
                break
        assert output.finish() == hit
        shown += output.take()
        assert hit == (StopHit(stop, count) if stop else None), (ids, stops)
        assert shown == output.text == expected + (stop if stop and include else "")
        if hit:
            assert output.append(ids) == hit and output.text == shown
            hits += 1
    assert hits > 150


def test_stop_string_in_the_last_run_of_bytes():
    """The text of a byte run appears when the output ends, and may complete a stop string then."""
    tokenizer = byte_fallback_tokenizer()
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    output = Detokenizer(TokenTable(tokenizer), stop=["b€"])
    assert output.append([5, *run]) is None
    assert output.finish() == StopHit("b€", 4)
    assert output.text == ""


@pytest.mark.parametrize("stop", [(), ("never seen", "nor this")])
def test_cost_per_token_does_not_grow(bundled, stop):
    """Time of the last of many tokens against the first ones, with a wide margin for a busy machine."""
    table = TokenTable(bundled)
    ids = bundled.encode("some ordinary text ", add_special_tokens=False).ids * 6000
    output = Detokenizer(table, stop=stop)
    best = {}
    quarter = len(ids) // 4
    for part in range(4):
        times = []
        for start in range(part * quarter, (part + 1) * quarter, 100):
            began = time.perf_counter()
            for token_id in ids[start : start + 100]:
                output.append([token_id])
                output.take()
            times.append(time.perf_counter() - began)
        best[part] = sorted(times)[len(times) // 4]
    assert best[3] < 3 * best[0]


def test_token_text(bundled):
    table = TokenTable(bundled)
    [token_id] = bundled.encode("a", add_special_tokens=False).ids
    assert table.token_text(token_id) == "a"
    assert table.token_text(1) == "<｜end▁of▁sentence｜>"
