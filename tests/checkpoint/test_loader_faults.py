"""Every damage to a checkpoint gives an error that names the tensor and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint.errors import CheckpointError
from deepinfer.checkpoint.loader import load_model, open_checkpoint
from deepinfer.config import ARITHMETICS
from tests.checkpoint.micro import (
    CONFIG,
    FIRST,
    INDEX,
    SECOND,
    Entry,
    file_of,
    micro_files,
    safetensors_bytes,
    split_header,
    widen,
    with_header,
    write,
)
from tests.support.paths import TINY_QUANT


def load(path: Path, **options: Any) -> object:
    return load_model(open_checkpoint(path), ARITHMETICS["float32"], use_tqdm=False, **options)


def refusal(path: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        load(path, **options)
    return error.value


def expect(error: CheckpointError, tensor: str | None, file: str, words: str) -> None:
    """The error's fields and its text name tensor and file."""
    assert error.tensor == tensor, error
    assert Path(error.file).name == file, error
    assert words in str(error), error
    assert file in str(error), error
    if tensor is not None:
        assert repr(tensor) in str(error), error


WQ_B = "layers.1.attn.wq_b.weight"
W2_SCALE = "layers.1.ffn.experts.1.w2.scale"
NORM = "norm.weight"
SINK = "layers.0.attn.attn_sink"


def test_undamaged(tmp_path: Path) -> None:
    assert load(write(tmp_path, micro_files())) is not None


# Tensors dropped, moved, doubled, renamed; index and shards that disagree.


@pytest.mark.parametrize("name", [WQ_B, W2_SCALE, NORM, SINK, "mtp.0.main_norm.weight"])
def test_dropped(tmp_path: Path, name: str) -> None:
    files = micro_files()
    del files[file_of(files, name)][name]
    expect(refusal(write(tmp_path, files)), name, INDEX, "missing")


def test_dropped_from_the_shard_only(tmp_path: Path) -> None:
    files = micro_files()
    weight_map = {name: file for file, entries in files.items() for name in entries}
    del files[FIRST][WQ_B]
    expect(refusal(write(tmp_path, files, weight_map)), WQ_B, FIRST, "the index names it")


def test_dropped_from_the_index_only(tmp_path: Path) -> None:
    files = micro_files()
    weight_map = {name: file for file, entries in files.items() for name in entries}
    del weight_map[WQ_B]
    expect(refusal(write(tmp_path, files, weight_map)), WQ_B, FIRST, "not in the index")


def test_index_points_at_the_other_shard(tmp_path: Path) -> None:
    files = micro_files()
    weight_map = {name: file for file, entries in files.items() for name in entries}
    weight_map[WQ_B] = SECOND
    expect(refusal(write(tmp_path, files, weight_map)), WQ_B, FIRST, f"the index says it is in {SECOND}")


def test_shard_does_not_exist(tmp_path: Path) -> None:
    (write(tmp_path, micro_files()) / SECOND).unlink()
    error = refusal(tmp_path)
    expect(error, error.tensor, SECOND, "does not exist")
    assert error.tensor in micro_files()[SECOND]


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", ""])
def test_index_names_a_path(tmp_path: Path, place: str) -> None:
    files = micro_files()
    weight_map = {name: file for file, entries in files.items() for name in entries}
    weight_map[NORM] = place
    expect(refusal(write(tmp_path, files, weight_map)), NORM, INDEX, "plain file name")


def test_duplicate(tmp_path: Path) -> None:
    files = micro_files()
    files[SECOND][WQ_B] = files[FIRST][WQ_B]
    expect(refusal(write(tmp_path, files)), WQ_B, SECOND, f"duplicate: also in {FIRST}")


def test_duplicate_with_and_without_prefix(tmp_path: Path) -> None:
    files = micro_files()
    files[SECOND]["model." + NORM] = files[SECOND][NORM]
    error = refusal(write(tmp_path, files))
    expect(error, NORM, SECOND, "duplicate")


def test_twice_in_one_header(tmp_path: Path) -> None:
    write(tmp_path, micro_files())
    header, data = split_header(tmp_path / SECOND)
    text = json.dumps(header)
    text = text[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    (tmp_path / SECOND).write_bytes(with_header(text, data))
    expect(refusal(tmp_path), NORM, SECOND, "twice in the header")


def test_renamed(tmp_path: Path) -> None:
    files = micro_files()
    files[FIRST]["layers.1.attn.wq_c.weight"] = files[FIRST].pop(WQ_B)
    expect(refusal(write(tmp_path, files)), WQ_B, INDEX, "missing")


@pytest.mark.parametrize(
    "name", ["layers.3.attn_norm.weight", "image_start", "vision.norm.weight", "lm_head.weight", "layers.0.x"]
)
def test_unexpected(tmp_path: Path, name: str) -> None:
    files = micro_files()
    files[SECOND][name] = files[SECOND][NORM]
    expect(refusal(write(tmp_path, files)), name, SECOND, "unexpected")


# Dtypes and shapes.


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        (NORM, "F16", "dtype is F16, must be BF16 or F32"),
        (SINK, "I32", "dtype is I32, must be F32"),
        (WQ_B, "I8", "dtype is I8, must be F8_E4M3"),
        (WQ_B, "F8_E5M2", "dtype 'F8_E5M2' is not supported"),
        (W2_SCALE, "U8", "dtype is U8, must be F8_E8M0"),
        ("layers.1.ffn.experts.1.w2.weight", "U8", "dtype is U8, must be I8"),
        (NORM, None, "dtype None is not supported"),
    ],
)
def test_wrong_dtype(tmp_path: Path, name: str, dtype: str, words: str) -> None:
    files = micro_files()
    file = file_of(files, name)
    files[file][name] = replace(files[file][name], dtype=dtype)
    expect(refusal(write(tmp_path, files)), name, file, words)


def test_narrower_than_the_release(tmp_path: Path) -> None:
    files = micro_files()
    files[FIRST][SINK] = Entry("BF16", (2,), bytes(4))
    expect(refusal(write(tmp_path, files)), SINK, FIRST, "dtype is BF16, must be F32")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (WQ_B, (32, 1024)),
        ("layers.1.attn.wq_b.scale", (1, 32)),
        (W2_SCALE, (32,)),
        (NORM, (32, 1)),
        ("layers.1.ffn.experts.1.w2.weight", (16, 32)),
    ],
)
def test_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    files = micro_files()
    file = file_of(files, name)
    files[file][name] = replace(files[file][name], shape=shape)
    expect(refusal(write(tmp_path, files)), name, file, f"shape is {list(shape)}, must be")


# Files cut short and headers out of range.


@pytest.mark.parametrize("keep", [0, 4, 8, 100])
def test_truncated_header(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path, micro_files()) / FIRST
    file.write_bytes(file.read_bytes()[:keep])
    expect(refusal(tmp_path), None, FIRST, "truncated")


@pytest.mark.parametrize("cut", [1, 1000, 50_000])
def test_truncated_data(tmp_path: Path, cut: int) -> None:
    file = write(tmp_path, micro_files()) / FIRST
    file.write_bytes(file.read_bytes()[:-cut])
    error = refusal(tmp_path)
    assert error.tensor in micro_files()[FIRST]
    expect(error, error.tensor, FIRST, "truncated")


def test_truncated_while_open(tmp_path: Path) -> None:
    """The header was proved, then the file shrank."""
    from deepinfer.checkpoint.reader import CheckpointReader

    with CheckpointReader(write(tmp_path, micro_files())) as reader:
        last = list(micro_files()[SECOND])[-1]
        file = tmp_path / SECOND
        with open(file, "r+b") as handle:
            handle.truncate(file.stat().st_size - 3)
        with pytest.raises(CheckpointError) as error:
            reader.read(last)
    expect(error.value, last, SECOND, "truncated: 3 bytes")


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    file = write(tmp_path, micro_files()) / FIRST
    file.write_bytes(file.read_bytes() + b"\0\0")
    expect(refusal(tmp_path), None, FIRST, "2 bytes after the last tensor")


def set_offsets(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[NORM]["data_offsets"] = value(*header[NORM]["data_offsets"])

    return change


def set_entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[NORM].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_offsets(lambda begin, end: [end, begin]), "out of range"),
        (set_offsets(lambda begin, end: [-64, 0]), "out of range"),
        (set_offsets(lambda begin, end: [10**12, 10**12 + 64]), "truncated"),
        (set_offsets(lambda begin, end: [begin, end + 2]), "span 66 bytes, BF16 [32] needs 64"),
        (set_offsets(lambda begin, end: [begin - 2, end - 2]), "overlaps"),
        (set_offsets(lambda begin, end: [begin]), "two integers"),
        (set_offsets(lambda begin, end: [begin, float(end)]), "two integers"),
        (set_offsets(lambda begin, end: None), "two integers"),
        (set_entry(shape=[-32]), "not a list of sizes"),
        (set_entry(shape=[32.0]), "not a list of sizes"),
        (set_entry(shape="32"), "not a list of sizes"),
        (set_entry(shape=[2**62, 2**62]), "needs"),
        (lambda header: header.update({NORM: 3}), "not an object"),
    ],
)
def test_header_entry_out_of_range(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    file = write(tmp_path, micro_files()) / SECOND
    header, data = split_header(file)
    change(header)
    file.write_bytes(with_header(json.dumps(header), data))
    expect(refusal(tmp_path), NORM, SECOND, words)


def test_gap_between_tensors(tmp_path: Path) -> None:
    file = write(tmp_path, micro_files()) / SECOND
    header, data = split_header(file)
    names = list(header)
    gone = names[3]
    del header[gone]
    file.write_bytes(with_header(json.dumps(header), data))
    expect(refusal(tmp_path), names[4], SECOND, "leaves a gap")


@pytest.mark.parametrize("header", ["", "{", "[]", "nonsense", '{"a": "\ud800"}'])
def test_header_is_no_json_object(tmp_path: Path, header: str) -> None:
    text = header.encode("utf-8", "surrogatepass")
    (write(tmp_path, micro_files()) / FIRST).write_bytes(len(text).to_bytes(8, "little") + text)
    expect(refusal(tmp_path), None, FIRST, "JSON")


def test_header_length_out_of_range(tmp_path: Path) -> None:
    file = write(tmp_path, micro_files()) / FIRST
    content = file.read_bytes()
    file.write_bytes((2**63).to_bytes(8, "little") + content[8:])
    expect(refusal(tmp_path), None, FIRST, "header length")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (write(tmp_path, micro_files()) / INDEX).write_text(content)
    assert INDEX in str(refusal(tmp_path))


# Values that no checkpoint may hold.


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.attn.wq_b.scale",
        W2_SCALE,
        "layers.1.engram.embed.scale",
        "layers.1.engram.wkv.scale",
        "mtp.0.ffn.experts.0.w1.scale",  # the drafter is checked though it is not built
        "mtp.0.main_proj.scale",
    ],
)
@pytest.mark.parametrize("place", [0, -1])
def test_nan_scale(tmp_path: Path, name: str, place: int) -> None:
    files = micro_files()
    file = file_of(files, name)
    files[file][name] = files[file][name].with_byte(place, 255)
    expect(refusal(write(tmp_path, files)), name, file, "NaN scale")


@pytest.mark.parametrize(
    ("name", "byte"),
    [
        (WQ_B, 0x7F),
        (WQ_B, 0xFF),
        ("layers.1.engram.embed.weight", 0xFF),
        ("mtp.0.attn.wkv.weight", 0x7F),
    ],
)
def test_nan_in_fp8(tmp_path: Path, name: str, byte: int) -> None:
    files = micro_files()
    file = file_of(files, name)
    files[file][name] = files[file][name].with_byte(-1, byte)
    error = refusal(write(tmp_path, files))
    expect(error, name, file, "holds a")
    assert "NaN" in str(error) or "not finite" in str(error)


@pytest.mark.parametrize("with_drafter", [False, True])
@pytest.mark.parametrize("name", [NORM, SINK, "embed.weight", "head.weight", "mtp.0.markov_head.head.weight"])
@pytest.mark.parametrize("top", [0x7F, 0xFF])
def test_infinite_value(tmp_path: Path, name: str, top: int, with_drafter: bool) -> None:
    files = micro_files()
    file = file_of(files, name)
    entry = files[file][name]  # the last item's two high bytes become those of an infinity
    files[file][name] = entry.with_byte(-1, top).with_byte(-2, 0x80)
    expect(refusal(write(tmp_path, files), with_drafter=with_drafter), name, file, "not finite")


def test_scale_that_overflows(tmp_path: Path) -> None:
    files = micro_files()
    name = "layers.1.attn.wq_b.scale"
    files[FIRST][name] = files[FIRST][name].with_byte(0, 254)
    files[FIRST][WQ_B] = files[FIRST][WQ_B].with_byte(0, 0x7E)  # 448 * 2^127
    expect(refusal(write(tmp_path, files)), WQ_B, FIRST, "not finite")


# What is tolerated.


def test_wider_dtypes_are_read_as_the_header_says(tmp_path: Path) -> None:
    files = micro_files()
    for name in (NORM, "layers.1.attn.compressor.wkv.weight", "mtp.0.confidence_head.proj.weight"):
        file = file_of(files, name)
        files[file][name] = widen(files[file][name])
    for name, shape, dtype, size in (
        (WQ_B, (1024, 32), "BF16", 2),
        ("layers.1.ffn.experts.1.w2.weight", (32, 32), "F32", 4),
        ("layers.1.engram.embed.weight", (24, 32), "BF16", 2),
    ):
        file = file_of(files, name)
        files[file][name] = Entry(dtype, shape, bytes(shape[0] * shape[1] * size))
        del files[file][name.replace(".weight", ".scale")]
    assert load(write(tmp_path, files)) is not None


def test_scale_beside_a_wide_matrix_is_unexpected(tmp_path: Path) -> None:
    files = micro_files()
    files[FIRST][WQ_B] = Entry("BF16", (1024, 32), bytes(1024 * 32 * 2))
    expect(refusal(write(tmp_path, files)), "layers.1.attn.wq_b.scale", FIRST, "unexpected")


def test_stray_drafter_embedding_is_ignored(tmp_path: Path) -> None:
    files = micro_files()
    files[SECOND]["mtp.0.embed.weight"] = Entry("BF16", (2,), b"\xff" * 4)
    files[SECOND]["mtp.0.head.weight"] = Entry("F16", (1, 1), bytes(2))
    assert load(write(tmp_path, files), with_drafter=True) is not None


def test_leading_model_in_names(tmp_path: Path) -> None:
    files = micro_files()
    prefixed = {file: {f"model.{name}": e for name, e in entries.items()} for file, entries in files.items()}
    assert load(write(tmp_path, prefixed)) is not None


def test_single_file_without_index(tmp_path: Path) -> None:
    files = micro_files()
    path = write(tmp_path, {"model.safetensors": {**files[FIRST], **files[SECOND]}})
    (path / INDEX).unlink()
    assert load(path) is not None
    (path / "other.safetensors").write_bytes(safetensors_bytes({}))
    expect(refusal(path), None, path.name, "other.safetensors")


def test_dropped_from_a_single_file(tmp_path: Path) -> None:
    files = micro_files()
    entries = {**files[FIRST], **files[SECOND]}
    del entries[NORM]
    path = write(tmp_path, {"model.safetensors": entries})
    (path / INDEX).unlink()
    expect(refusal(path), NORM, "model.safetensors", "missing")


def test_bf16_checkpoint(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    assert load(write(tmp_path, micro_files(config), config=config)) is not None


# The list of digests.


def digests(path: Path) -> dict[str, str]:
    import hashlib

    return {
        file: hashlib.sha256((path / file).read_bytes()).hexdigest()
        for file in (FIRST, SECOND, "config.json")
    }


def test_sha256(tmp_path: Path) -> None:
    path = write(tmp_path / "model", micro_files())
    good = digests(path)
    assert load(path, sha256=good) is not None
    listed = tmp_path / "sums.txt"
    listed.write_text(
        "".join(f"{digest} {mark}{name}\n" for (name, digest), mark in zip(good.items(), " * "))
    )
    assert load(path, sha256=listed) is not None
    expect(refusal(path, sha256={**good, SECOND: "0" * 64}), None, SECOND, "SHA-256")
    expect(refusal(path, sha256={FIRST: good[FIRST]}), None, SECOND, "not in the list")
    expect(refusal(path, sha256={**good, "gone.json": "0" * 64}), None, "gone.json", "cannot be read")
    listed.write_text("not a digest\n")
    expect(refusal(path, sha256=listed), None, "sums.txt", "line 1")
    expect(refusal(path, sha256=tmp_path / "none.txt"), None, "none.txt", "cannot be read")


def test_sha256_sees_one_flipped_bit(tmp_path: Path) -> None:
    path = write(tmp_path, micro_files())
    good = digests(path)
    content = bytearray((path / FIRST).read_bytes())
    content[-5] ^= 1
    (path / FIRST).write_bytes(content)
    expect(refusal(path, sha256=good), None, FIRST, good[FIRST])


# The bundled random model itself.


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """tiny-quant with its own copy of the second shard, the rest linked."""
    for file in TINY_QUANT.iterdir():
        if file.name == SECOND:
            (tmp_path / SECOND).write_bytes(file.read_bytes())
        else:
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


def test_real_checkpoint_truncated(copied: Path) -> None:
    assert load(copied) is not None
    with open(copied / SECOND, "r+b") as file:
        file.truncate((copied / SECOND).stat().st_size - 1)
    error = refusal(copied)
    expect(error, error.tensor, SECOND, "truncated")
    assert error.tensor is not None


def test_real_checkpoint_nan_scale(copied: Path) -> None:
    name = "layers.6.ffn.experts.3.w1.scale"
    header, _ = split_header(copied / SECOND)
    with open(copied / SECOND, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(8 + length + header[name]["data_offsets"][0] + 5)
        file.write(b"\xff")
    expect(refusal(copied), name, SECOND, "NaN scale")
