"""Operator `advance_streams`: see op.py for its meaning."""
