"""Operator `linear_w8a8`: see op.py for its meaning."""
