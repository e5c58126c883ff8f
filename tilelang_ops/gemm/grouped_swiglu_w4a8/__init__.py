"""Operator `grouped_swiglu_w4a8`: see op.py for its meaning."""
