"""Operator `gather_columns`: see op.py for its meaning."""
