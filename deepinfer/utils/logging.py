"""Logging: the `deepinfer` logger, which writes to stderr unless the program configured it."""

from __future__ import annotations

import logging

_ROOT = "deepinfer"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below `deepinfer`.

    The first call gives `deepinfer` a stderr handler at level INFO when neither it nor the root logger has
    one, so that a script sees the engine's lines; a program with its own logging keeps it.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    return logging.getLogger(name)
