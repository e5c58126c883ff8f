"""Operator `verify_ratio`: see op.py for its meaning."""
