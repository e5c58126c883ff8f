"""Step times: how long a decode step takes for a number of requests and of query tokens.

The verify-length scheduler weighs tokens against time, so the curve is measured once at start-up and kept on
disk; while serving, the core corrects it by what steps really take. Measuring needs no requests: the caches
hold nothing yet, so any slot and block may be read and overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.runtime.batch import Batch
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

NUM_WARMUP, NUM_TIMED = 1, 5  # runs per size; the fastest and the slowest timed one are dropped
CONTEXT_TOKENS = 256  # tokens that a measured request already has
FILE_PREFIX = "step-time-"  # the only files that this module reads, writes or removes


@dataclass(frozen=True)
class StepTimePoint:
    """A measured step."""

    num_seqs: int
    num_tokens: int
    ms: float


def sizes_to_measure(max_num_seqs: int, num_draft_tokens: int) -> list[tuple[int, int]]:
    """(requests, query tokens) of the grid: powers of two and the maximum, with 0, some and all drafts."""
    counts = sorted({min(2**i, max_num_seqs) for i in range(max_num_seqs.bit_length() + 1)})
    lengths = sorted({0, (num_draft_tokens + 1) // 2, num_draft_tokens})
    return [(count, count * (1 + drafts)) for count in counts for drafts in lengths]


def measure(run: Callable[[int, int], None], sizes: Sequence[tuple[int, int]]) -> list[StepTimePoint]:
    """Time steps.

    Args:
        run: (num_seqs, num_tokens) runs one step to its end.
        sizes: what to measure, as (requests, query tokens).

    Returns:
        One point per size: the mean of the timed runs without the fastest and the slowest.
    """
    points = []
    for num_seqs, num_tokens in sorted(sizes, reverse=True):
        times = []
        for _ in range(NUM_WARMUP + NUM_TIMED):
            start = time.perf_counter()
            run(num_seqs, num_tokens)
            times.append(1e3 * (time.perf_counter() - start))
        kept = sorted(times[NUM_WARMUP:])[1:-1]
        points.append(StepTimePoint(num_seqs, num_tokens, statistics.fmean(kept)))
    return points[::-1]


def synthetic_batch(
    num_seqs: int, num_tokens: int, *, num_blocks: int, num_slots: int, block_size: int, max_ngram: int
) -> Batch:
    """A decode batch of equal requests with `CONTEXT_TOKENS` tokens each; slots and blocks may repeat."""
    width = num_tokens // num_seqs
    assert width * num_seqs == num_tokens, f"{num_seqs=} {num_tokens=}"
    seqs = torch.arange(num_seqs, dtype=torch.int32)
    row_seq = seqs.repeat_interleave(width)
    length = CONTEXT_TOKENS + width
    blocks_per_seq = -(-length // block_size)
    blocks = torch.arange(num_seqs * blocks_per_seq, dtype=torch.int32) % max(num_blocks - 1, 1) + 1
    lengths = torch.full((num_seqs,), length, dtype=torch.int32)
    return Batch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=CONTEXT_TOKENS + torch.arange(width, dtype=torch.int32).repeat(num_seqs),
        row_seq=row_seq,
        ngram_ids=torch.zeros(num_tokens, max_ngram, dtype=torch.int32),
        cu_seqlens_q=torch.arange(0, num_tokens + 1, width, dtype=torch.int32),
        seqlens_k=lengths,
        state_slots=seqs % max(num_slots - 1, 1) + 1,
        block_tables=blocks.view(num_seqs, blocks_per_seq),
        total_lens=lengths,
        keep_all=torch.zeros(num_seqs, dtype=torch.int32),
        output_rows=torch.arange(num_tokens, dtype=torch.int32),
        max_seqlen_k=length,
        is_prefill=False,
    )


class StepTimeCache:
    """Measured curves on disk, one file per key.

    Only files of this module's own naming are ever touched. A file that is torn, foreign or too old is
    ignored, with a line in the log.

    Args:
        directory: where the files lie; made when needed.
        max_age_seconds: how long a curve is believed.
    """

    def __init__(self, directory: str | Path, max_age_seconds: float) -> None:
        self._directory = Path(directory)
        self._max_age_seconds = max_age_seconds

    def read(self, key: dict[str, object]) -> list[StepTimePoint] | None:
        """The curve of a key, None when there is none to believe."""
        path = self._path(key)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["key"] != _jsonable(key):
                return None
            age = time.time() - float(record["measured_at"])
            points = [StepTimePoint(int(n), int(q), float(ms)) for n, q, ms in record["points"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("step-time file %s is not readable (%s): measuring again", path, error)
            return None
        if not 0 <= age <= self._max_age_seconds or not points or any(not p.ms > 0 for p in points):
            return None
        return points

    def write(self, key: dict[str, object], points: Sequence[StepTimePoint]) -> None:
        """Keep a curve; readers see the old file or the new one, never a part."""
        record = {
            "key": _jsonable(key),
            "measured_at": time.time(),
            "points": [[p.num_seqs, p.num_tokens, p.ms] for p in points],
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=FILE_PREFIX, suffix=".tmp", dir=self._directory)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path(key))
        except OSError as error:
            logger.warning("step times could not be kept in %s: %s", self._directory, error)

    def _path(self, key: dict[str, object]) -> Path:
        digest = hashlib.sha256(json.dumps(_jsonable(key), sort_keys=True).encode()).hexdigest()
        return self._directory / f"{FILE_PREFIX}{digest[:32]}.json"


def _jsonable(key: dict[str, object]) -> dict[str, object]:
    """The key as it reads back from JSON."""
    return json.loads(json.dumps(key, sort_keys=True, default=str))
