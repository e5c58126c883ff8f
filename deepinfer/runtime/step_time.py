"""Step times: how long a decode step takes for a number of requests and of query tokens.

The verify-length scheduler weighs tokens against time, so the curve is measured once at start-up and kept on
disk; while serving, the core corrects it by what steps really take. Measuring needs no requests: the caches
hold nothing yet, so any slot and block may be read and overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

NUM_ROUNDS = 6  # runs of a size
MAX_SECONDS = 0.6  # no run begins when those of a size have taken so long
FILE_PREFIX = "step-time-"  # the only files that this module reads or writes


@dataclass(frozen=True)
class StepSize:
    """What a decode step does.

    Attributes:
        num_seqs: requests.
        num_tokens: query tokens, one for each request and one for each draft that it verifies.
        is_drafted: it proposes drafts at its end.
    """

    num_seqs: int
    num_tokens: int
    is_drafted: bool = True


@dataclass(frozen=True)
class StepTimes:
    """A measured curve: milliseconds by size."""

    ms: dict[StepSize, float]

    def for_core(self) -> tuple[list[tuple[int, int, float]], list[tuple[int, float]]]:
        """Arguments of the core's `set_step_times`."""
        drafted = [(size.num_seqs, size.num_tokens, ms) for size, ms in self.ms.items() if size.is_drafted]
        undrafted = [(size.num_seqs, ms) for size, ms in self.ms.items() if not size.is_drafted]
        return drafted, undrafted


def sizes_to_measure(max_num_seqs: int, num_draft_tokens: int) -> list[StepSize]:
    """Some numbers of requests up to the maximum, with 0, some and all drafts, and without proposing any."""
    counts = sorted({n for n in (1, 2, 4, 8, 16, 64, 256, 1024) if n < max_num_seqs} | {max_num_seqs})
    lengths = sorted({0, (num_draft_tokens + 1) // 2, num_draft_tokens})
    drafted = [StepSize(count, count * (1 + drafts)) for count in counts for drafts in lengths]
    return drafted + [StepSize(count, count, is_drafted=False) for count in counts]


def measure(run: Callable[[StepSize], None], sizes: Sequence[StepSize]) -> StepTimes:
    """Time steps.

    Args:
        run: runs one step to its end.
        sizes: what to measure.

    Returns:
        The least time of each size: what disturbs a step only makes it longer, and what serving adds is
        learnt while serving. Rounds go over all sizes, so that a slow moment does not fall on one of them; a
        size that takes long is in fewer rounds.
    """
    ordered = sorted(sizes, key=astuple)
    least = dict.fromkeys(ordered, math.inf)
    spent = dict.fromkeys(ordered, 0.0)
    run(ordered[0])
    for _ in range(NUM_ROUNDS):
        for size in reversed(ordered):  # the largest one grows the buffers
            if spent[size] < MAX_SECONDS:
                start = time.perf_counter()
                run(size)
                seconds = time.perf_counter() - start
                least[size] = min(least[size], seconds)
                spent[size] += seconds
    return StepTimes({size: 1e3 * seconds for size, seconds in least.items()})


class StepTimeCache:
    """Measured curves on disk, one file per key.

    Only files of this module's own naming are ever touched. A file that is torn, foreign or too old is
    ignored; one that is torn with a line in the log.

    Args:
        directory: where the files lie; made when needed.
        max_age_seconds: how long a curve is believed.
    """

    def __init__(self, directory: str | Path, max_age_seconds: float) -> None:
        self._directory = Path(directory)
        self._max_age_seconds = max_age_seconds

    def read(self, key: dict[str, object]) -> StepTimes | None:
        """The curve of a key, None when there is none to believe."""
        path = self._path(key)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["key"] != _jsonable(key):
                return None
            age = time.time() - float(record["measured_at"])
            times = {
                StepSize(int(num_seqs), int(num_tokens), bool(is_drafted)): float(ms)
                for num_seqs, num_tokens, is_drafted, ms in record["times"]
            }
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("step-time file %s is not readable (%s): measuring again", path, error)
            return None
        is_sane = times and all(math.isfinite(ms) and ms > 0 for ms in times.values())
        return StepTimes(times) if is_sane and 0 <= age <= self._max_age_seconds else None

    def write(self, key: dict[str, object], times: StepTimes) -> None:
        """Keep a curve; readers see the old file or the new one, never a part. A failure is only logged."""
        record = {
            "key": _jsonable(key),
            "measured_at": time.time(),
            "times": [[*astuple(size), ms] for size, ms in times.ms.items()],
        }
        name = None
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
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name)

    def _path(self, key: dict[str, object]) -> Path:
        digest = hashlib.sha256(json.dumps(_jsonable(key), sort_keys=True).encode()).hexdigest()
        return self._directory / f"{FILE_PREFIX}{digest[:32]}.json"


def _jsonable(key: dict[str, object]) -> dict[str, object]:
    """The key as it reads back from JSON."""
    return json.loads(json.dumps(key, sort_keys=True, default=str))
