"""The command `python -m deepinfer.replay_report`; see `deepinfer.entrypoints.replay_report`."""

from __future__ import annotations

import sys

from deepinfer.entrypoints.replay_report import main

if __name__ == "__main__":
    sys.exit(main())
