"""The command `python -m deepinfer.calibrate`; see `deepinfer.entrypoints.calibrate`."""

from __future__ import annotations

import sys

from deepinfer.entrypoints.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
