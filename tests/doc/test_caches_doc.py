"""The numbers in doc/caches.md and doc/model.md are those of the code: their tables are built here again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer.models.base import ModelSpec
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.runtime.cache_layout import CacheLayout
from tests.checkpoint.configs import RELEASE
from tests.support.models import load_config
from tests.support.paths import ROOT

CACHES = (ROOT / "doc" / "caches.md").read_text()
MODEL = (ROOT / "doc" / "model.md").read_text()
NAMES = ("release", "v41-tiny")
BACKTRACKING = 6  # of the drawn slots: five drafts and one


def config_of(name: str) -> DeepseekV41Config:
    return DeepseekV41Config.from_dict(RELEASE) if name == "release" else load_config(name)


def layout_of(name: str, max_backtracking: int = BACKTRACKING, release: bool = True) -> CacheLayout:
    spec: ModelSpec = model_spec(config_of(name))
    return CacheLayout.build(spec, release=release, block_size=128, max_backtracking=max_backtracking)


def row(*cells: object) -> str:
    """A row of a table; numbers have thousands separated."""
    return f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in cells)} |"


def record_rows() -> Iterator[str]:
    release, plain = layout_of("release"), layout_of("release", release=False)
    window, paged, state = release.windows[0], release.paged[0], release.compression[0]
    yield row(
        "window KV",
        "512 E4M3, 16 E8M0 (one per 32 channels)",
        window.record_bytes,
        plain.windows[0].record_bytes,
    )
    yield row(
        "main KV entry",
        "256 pairs of E2M1, 32 E4M3 (one per 16 channels)",
        paged.main_bytes,
        plain.paged[0].main_bytes,
    )
    yield row(
        "index key",
        "64 pairs of E2M1 and, elsewhere, 4 E8M0 (one per 32 channels)",
        f"{paged.code_bytes} + {paged.scale_bytes}",
        plain.paged[0].code_bytes,
    )
    yield row("open group", "2 x 512 float32: gate scores, projections", *[state.num_bytes // state.ring] * 2)


def block_rows(name: str) -> Iterator[str]:
    layout = layout_of(name)
    for s in layout.paged:
        codes, scales = s.entries * s.code_bytes, s.entries * s.scale_bytes
        main = s.entries * s.main_bytes
        yield row(
            s.layer_id, s.ratio, s.entries, s.index_offset, codes, s.scale_offset, scales, s.main_offset, main
        )
    end = layout.paged[-1].main_offset + layout.paged[-1].entries * layout.paged[-1].main_bytes
    yield row("end of the sections", "", "", end, "", "", "", "", "")
    yield row("**stride**", "", "", layout.block_bytes, "", "", "", "", "")


def slot_rows(name: str) -> Iterator[str]:
    layout, config = layout_of(name), config_of(name)
    ring, state = layout.windows[0].num_bytes, layout.compression[0].num_bytes
    decoder, last = config.first_decoder_layer, config.num_hidden_layers - 1
    stored, others = layout.windows[:decoder], layout.windows[decoder:]
    drafter = [f"mtp.{i}" for i in range(config.num_nextn_predict_layers)]
    owners = ", ".join(str(c.layer_id) for c in layout.compression)
    yield row(
        f"window rings of layers 0 to {decoder - 1}",
        f"{len(stored)} x {ring:,}",
        0,
        layout.stored_slot_bytes,
    )
    yield row(
        f"window rings of layers {decoder} to {last}, {drafter[0]} to {drafter[-1]}",
        f"{len(others)} x {ring:,}",
        others[0].offset,
        len(others) * ring,
    )
    yield row(
        f"compression rings of layers {owners}" if "," in owners else f"compression ring of layer {owners}",
        f"{len(layout.compression)} x {state:,}",
        layout.compression[0].offset,
        len(layout.compression) * state,
    )
    yield row("**stride**", "", layout.slot_bytes, "")


def total_rows() -> Iterator[str]:
    for name in NAMES:
        for max_backtracking in (1, BACKTRACKING):
            layout = layout_of(name, max_backtracking)
            yield row(
                name,
                max_backtracking,
                layout.windows[0].ring,
                layout.compression[0].ring,
                int(layout.bytes_per_token()),
                layout.block_bytes,
                layout.slot_bytes,
                layout.stored_slot_bytes,
            )


def skipping_rows() -> Iterator[str]:
    for name in NAMES:
        config = config_of(name)
        first, last = config.first_decoder_layer, config.num_hidden_layers - 1
        window = config.sliding_window
        rows = window + (last - first) * (window - 1)
        yield f"| {name} | {first} to {last} | {rows} | {window - 1} less | {window} |"


def check_table(page: str, rows: list[str]) -> None:
    """Every row stands in the page, in this order and without another row in between."""
    assert "\n".join(rows) in page, "the page should hold:\n" + "\n".join(rows)


def test_records() -> None:
    check_table(CACHES, list(record_rows()))


@pytest.mark.parametrize("name", NAMES)
def test_block(name: str) -> None:
    check_table(CACHES, list(block_rows(name)))


@pytest.mark.parametrize("name", NAMES)
def test_slot(name: str) -> None:
    check_table(CACHES, list(slot_rows(name)))


def test_totals() -> None:
    check_table(CACHES, list(total_rows()))


def test_rows_of_the_decoder() -> None:
    check_table(MODEL, list(skipping_rows()))


def test_entry_addresses_of_the_example() -> None:
    """The page's worked example: token 1,001 in the release's layers 2 and 20."""
    layout = layout_of("release")
    token, block = 1001, 1001 // 128
    lines = []
    for section in (layout.paged[0], layout.paged[-1]):
        entry = token // section.ratio
        assert entry // section.entries == block
        place = entry % section.entries
        lines.append(
            row(
                section.layer_id,
                entry,
                place,
                section.index_offset + place * section.code_bytes,
                section.scale_offset + place * section.scale_bytes,
                section.main_offset + place * section.main_bytes,
            )
        )
    check_table(CACHES, lines)
    assert f"logical block {block}" in " ".join(CACHES.split())


if __name__ == "__main__":  # prints the tables
    for table in (
        record_rows(),
        *map(block_rows, NAMES),
        *map(slot_rows, NAMES),
        total_rows(),
        skipping_rows(),
    ):
        print("\n".join(table), end="\n\n")
