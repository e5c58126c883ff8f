"""Which source scales the confidences, what the scale does, and files that are refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from deepinfer.sampling.confidence import (
    FILE_FORMAT,
    ConfidenceScale,
    read_calibration,
    resolve_confidence_scale,
    write_calibration,
)

CHECKPOINT = (1.5, 1.125, 1.0, 1.25, 1.75)


@pytest.fixture
def calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(path, [2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.5, 0.0, 0.0, -1.0], {"num_blocks": 7})
    return path


def numbers(scale: ConfidenceScale) -> tuple[list[float], list[float]]:
    return scale.temperatures.tolist(), scale.offsets.tolist()


def confidences(scale: ConfidenceScale, logits: list[list[float]]) -> torch.Tensor:
    """Of drafts that end nothing."""
    values = torch.tensor(logits)
    out = torch.zeros(values.shape, dtype=torch.int32), torch.empty_like(values), torch.empty_like(values)
    scale.finish(torch.zeros_like(out[0]), values, 1, out)
    return out[1]


def test_order_of_sources(calibration_file):
    environment, checkpoint = [0.5] * 5, CHECKPOINT
    zeros = [0.0] * 5
    found = resolve_confidence_scale(
        5, environment=environment, calibration_file=calibration_file, checkpoint=checkpoint
    )
    assert numbers(found) == (environment, zeros)
    found = resolve_confidence_scale(5, calibration_file=calibration_file, checkpoint=checkpoint)
    assert numbers(found) == ([2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.5, 0.0, 0.0, -1.0])
    assert numbers(resolve_confidence_scale(5, checkpoint=checkpoint)) == (list(checkpoint), zeros)
    assert numbers(resolve_confidence_scale(5)) == ([1.0] * 5, zeros)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_drafts_than_the_block(count, calibration_file):
    from_file = resolve_confidence_scale(count, calibration_file=calibration_file)
    assert from_file.temperatures.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0][:count]
    assert from_file.offsets.shape == (count,)
    assert resolve_confidence_scale(count, checkpoint=CHECKPOINT).temperatures.tolist() == list(
        CHECKPOINT[:count]
    )


def test_environment_gives_one_number_or_one_per_draft():
    assert resolve_confidence_scale(3, environment=[2.5]).temperatures.tolist() == [2.5] * 3
    assert resolve_confidence_scale(3, environment=[1, 2, 3]).temperatures.tolist() == [1, 2, 3]
    for wrong in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(ValueError, match=f"HEAD_TEMPERATURE has {len(wrong)} numbers.*or 3"):
            resolve_confidence_scale(3, environment=wrong)


def test_temperatures_have_a_floor():
    scale = resolve_confidence_scale(2, environment=[0.0, 1.0])
    assert scale.temperatures.tolist() == pytest.approx([1e-5, 1.0])
    found = confidences(scale, [[3.0, 0.0], [-3.0, 0.0]])
    assert found.isfinite().all() and found[0, 0] == 1.0 and 0 < found[1, 0] < 1e-25


def test_without_speculation_nothing_is_looked_at():
    scale = resolve_confidence_scale(0, environment=[1, 2], calibration_file="nowhere", checkpoint=CHECKPOINT)
    assert scale.temperatures.shape == scale.offsets.shape == (0,)


def test_confidences_by_the_formula():
    scale = ConfidenceScale.of([2.0, 0.5], [0.0, -1.0])
    logits = [[1.0, 1.0], [-4.0, 0.25]]
    found = confidences(scale, logits).tolist()
    for row, values in zip(found, logits):
        for value, logit, t, b in zip(row, values, (2.0, 0.5), (0.0, -1.0)):
            assert value == pytest.approx(1 / (1 + math.exp(-(logit / t + b))), rel=1e-6)


def test_notes_are_kept(calibration_file):
    assert read_calibration(calibration_file)["num_blocks"] == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "is no calibration file"),
        ('{"temperatures": [1], "offsets": [0]}', "is no calibration file"),
        ({"temperatures": [1, 0], "offsets": [0, 0]}, "temperatures must be"),
        ({"temperatures": [True], "offsets": [0]}, "temperatures must be"),
        ({"temperatures": [1], "offsets": ["0"]}, "offsets must be"),
        ({"temperatures": [1], "offsets": [float("nan")]}, "offsets must be"),
        ({"temperatures": [1, 1], "offsets": [0]}, "differ in length"),
        ({"temperatures": [1.0] * 4, "offsets": [0] * 4}, "calibrates 4 draft positions, 5 are used"),
    ],
)
def test_files_that_are_refused(tmp_path, content, words):
    path = tmp_path / "calibration.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"format": FILE_FORMAT, **content}))
    with pytest.raises(ValueError, match=words) as error:
        resolve_confidence_scale(5, calibration_file=path, checkpoint=CHECKPOINT)
    assert str(path) in str(error.value)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        resolve_confidence_scale(5, calibration_file=tmp_path / "nothing.json")
