"""Operator `grouped_linear_w4a8`: see op.py for its meaning."""
