"""Operator `swiglu`: see op.py for its meaning."""
