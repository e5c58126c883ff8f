"""Operator `linear`: see op.py for its meaning."""
