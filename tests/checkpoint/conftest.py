"""Tests of the release's chat format run where its package, an extra of this one, is installed."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("deepseek_recipe") else ["test_recipe.py"]
