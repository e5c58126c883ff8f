"""Operator `expand_streams`: see op.py for its meaning."""
