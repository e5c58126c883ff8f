"""Binds the process to the cores that stand next to its device."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")


def parse_cpu_list(text: str) -> set[int]:
    """Cores of a kernel list such as "0-15,32-47".

    Raises:
        ValueError: it is none.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_near(pci_bus_id: str, devices: Path = PCI_DEVICES) -> set[int] | None:
    """Let this thread, and those that it starts, run on the cores of a device's memory node only.

    Cores that the process may not use stay out of it. What cannot be found out is logged and changes nothing.

    Args:
        pci_bus_id: as in `devices`, for example "0000:1b:00.0".
        devices: the kernel's directory of PCI devices.

    Returns:
        The cores; None when nothing was bound.
    """
    try:
        near = parse_cpu_list((devices / pci_bus_id.lower() / "local_cpulist").read_text())
        cores = near & os.sched_getaffinity(0)
        if not cores:
            logger.warning("no core near device %s may be used: not bound", pci_bus_id)
            return None
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        logger.warning("cores near device %s are not known (%s): not bound", pci_bus_id, error)
        return None
    return cores
