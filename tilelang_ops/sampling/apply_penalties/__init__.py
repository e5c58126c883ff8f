"""Operator `apply_penalties`: see op.py for its meaning."""
