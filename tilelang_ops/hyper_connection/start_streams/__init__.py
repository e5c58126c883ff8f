"""Operator `start_streams`: see op.py for its meaning."""
