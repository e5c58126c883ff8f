"""Sync guard: launches that would make the host wait for the device are errors where they are forbidden."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SyncGuard:
    """Switches torch's check for hidden waits; waiting for events is never an error.

    Args:
        enabled: False makes both scopes do nothing, as on a CPU.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def forbid(self) -> Iterator[None]:
        """Inside, an operation that waits for the device raises RuntimeError."""
        with self._mode("error"):
            yield

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Inside, waiting is meant, also within `forbid`."""
        with self._mode("default"):
            yield

    @contextmanager
    def _mode(self, mode: str) -> Iterator[None]:
        if not self._enabled:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
