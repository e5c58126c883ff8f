"""Devices: what the engine asks of one, and the devices that it knows."""

from __future__ import annotations

import torch

from deepinfer.platform.base import DeviceQueue
from deepinfer.settings import Settings
from deepinfer.utils.sync_guard import SyncGuard


def open_device(settings: Settings) -> tuple[torch.device, DeviceQueue | None]:
    """Where the engine runs: on torch's current GPU, if kernels are written for it, else on the CPU.

    Returns:
        the device, and its queue; None for a CPU, which has none.

    Raises:
        ValueError: the accelerator that is asked for by name is not there, or nothing is written for it.
    """
    from deepinfer.platform import nvidia

    wanted = settings.accelerator
    if wanted == "cpu":
        return torch.device("cpu"), None
    problem = "this engine runs on GPUs and CPUs only so far" if wanted == "ascend" else nvidia.problem()
    if problem is not None:
        if wanted != "auto":
            raise ValueError(f"DEEPINFER_ACCELERATOR={wanted}: {problem}; unset it or choose cpu")
        return torch.device("cpu"), None
    device = torch.device("cuda", torch.cuda.current_device())
    if not settings.disable_core_binding:
        nvidia.bind_cores(device)
    return device, nvidia.CudaQueue(device, SyncGuard(not settings.disable_sync_guard))
