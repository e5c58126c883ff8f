"""Operator `judge_rows`: see op.py for its meaning."""
