"""Scale: how many devices take part, from the environment as in the original benchmark."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Devices of all nodes.

    Attributes:
        world_size: nodes, `WORLD_SIZE`.
        rank: this node, `RANK`.
        num_visible: devices of a node, the entries of `CUDA_VISIBLE_DEVICES`.
        cp: ranks that share a request's context.
    """

    world_size: int
    rank: int
    num_visible: int
    cp: int

    @property
    def ep(self) -> int:
        """Ranks among which the experts are divided: every device."""
        return self.world_size * self.num_visible

    @property
    def dp(self) -> int:
        """Engines."""
        return self.ep // self.cp

    @classmethod
    def from_env(cls, cp: int, environment: Mapping[str, str] = os.environ) -> Scale:
        """Read `WORLD_SIZE`, `RANK` and `CUDA_VISIBLE_DEVICES`; each absent one means 1 node or device.

        Raises:
            ValueError: a number is none, or `cp` does not divide the devices.
        """
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        num_visible = len([entry for entry in visible.split(",") if entry.strip()]) or 1
        scale = cls(_number(environment, "WORLD_SIZE", 1), _number(environment, "RANK", 0), num_visible, cp)
        if scale.world_size < 1 or not 0 <= scale.rank < scale.world_size:
            raise ValueError(
                f"WORLD_SIZE={scale.world_size} RANK={scale.rank}: expected a node in [0, WORLD_SIZE)"
            )
        if cp < 1 or scale.ep % cp:
            raise ValueError(f"--cp {cp} does not divide the {scale.ep} devices (WORLD_SIZE x visible ones)")
        return scale

    def check_supported(self) -> None:
        """Raise ValueError when this needs more devices than an engine runs on."""
        if self.ep > 1:
            raise ValueError(
                f"WORLD_SIZE={self.world_size} with {self.num_visible} visible devices asks for expert "
                f"parallelism over {self.ep} devices: an engine runs on one device so far. Unset WORLD_SIZE, "
                "name one device in CUDA_VISIBLE_DEVICES, and use --dummy --emulated_ep to measure the work "
                "of one rank of such a group"
            )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: expected a whole number") from None
