"""Progress of an offline batch: a bar while it runs, one line when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.utils.logging import get_logger

if TYPE_CHECKING:
    from deepinfer.outputs import RequestOutput

logger = get_logger(__name__)


class Progress:
    """Counts finished requests and their tokens.

    Args:
        num_requests: requests of the batch.
        use_bar: draw a tqdm bar on stderr.
    """

    def __init__(self, num_requests: int, use_bar: bool) -> None:
        self._num_requests = num_requests
        self._start = time.monotonic()
        self._num_finished = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._bar = None
        if use_bar:
            from tqdm import tqdm

            self._bar = tqdm(total=num_requests, desc="requests", unit="req", dynamic_ncols=True)

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Count finished requests."""
        for output in outputs:
            self._num_finished += 1
            self._prompt_tokens += len(output.prompt_token_ids)
            self._output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        if self._bar is not None and outputs:
            self._bar.update(len(outputs))
            self._bar.set_postfix_str(self._rates(), refresh=False)

    def close(self) -> None:
        """End the bar and log the summary line."""
        if self._bar is not None:
            self._bar.close()
        seconds = time.monotonic() - self._start
        logger.info(
            "%d of %d requests in %.2f s: %d prompt tokens, %d output tokens, %s",
            self._num_finished,
            self._num_requests,
            seconds,
            self._prompt_tokens,
            self._output_tokens,
            self._rates(),
        )

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        prompt, output = self._prompt_tokens / seconds, self._output_tokens / seconds
        return f"prompt {prompt:.1f} tok/s, output {output:.1f} tok/s"
