"""Emulation: requests over random weights that begin where a measurement wants them to.

The caches of an engine with `load_format="dummy"` are full of random records from the start, so a prompt that
is not computed leaves what a computed one would.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.engine.intake import Intake, Prompt
from deepinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine.assembly import OutputAssembler
    from deepinfer.engine.executor import Executor


class Emulation:
    """What an engine with random weights offers beyond others.

    Args:
        core: its `_core.EngineCore`.
        executor: the device's work.
        assembler: submits sequences.
        intake: checks requests.
        pretended: the model, which can leave out prefills.
        num_draft_tokens: drafts of a step.
    """

    def __init__(
        self,
        core: Any,
        executor: Executor,
        assembler: OutputAssembler,
        intake: Intake,
        pretended: Any,
        num_draft_tokens: int,
    ) -> None:
        self._core = core
        self._executor = executor
        self._assembler = assembler
        self._intake = intake
        self._pretended = pretended
        self._num_draft_tokens = num_draft_tokens

    @contextlib.contextmanager
    def pretended_prefill(self) -> Iterator[None]:
        """Prefill steps that run inside compute nothing."""
        self._pretended.is_on = True
        try:
            yield
        finally:
            self._executor.drain()
            self._pretended.is_on = False

    def add_begun_request(
        self, request_id: str, token_ids: np.ndarray, sampling_params: SamplingParams
    ) -> None:
        """Queue a request whose prompt counts as computed, with its first output token and drafts behind.

        It decodes from the next step on.

        Args:
            request_id: names the request in results.
            token_ids: [n] int32 the prompt; its last token stands for the output as well, and for drafts.
            sampling_params: of the request.

        Raises:
            InvalidRequestError: the request cannot run.
            ValueError: there is no room for it now.
        """
        request = self._intake.check(request_id, Prompt.of(token_ids), sampling_params)
        drafts = np.repeat(request.token_ids[-1:], self._num_draft_tokens)
        now = time.monotonic()
        seq_id = self._assembler.resume(
            request,
            0,
            stream=False,
            arrival_time=time.time(),
            arrival=now,
            tokens=np.append(request.token_ids, request.token_ids[-1]),
            num_prompt=len(request.token_ids),
            drafts=drafts,
            confidences=np.full(len(drafts), 0.5, dtype=np.float32),
            first_scheduled=now,
            first_token=now,
        )
        if all(admitted != seq_id for admitted, _, _ in self._core.admit_computed()):
            self._assembler.drop([request_id])
            raise ValueError(
                f"the caches have no room for request {request_id!r}: lower their number or length"
            )
