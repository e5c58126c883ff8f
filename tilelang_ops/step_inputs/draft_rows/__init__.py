"""Operator `draft_rows`: see op.py for its meaning."""
