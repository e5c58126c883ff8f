"""Operator `collapse_streams`: see op.py for its meaning."""
