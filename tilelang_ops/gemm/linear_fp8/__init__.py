"""Operator `linear_fp8`: see op.py for its meaning."""
