"""Operator `last_tokens`: see op.py for its meaning."""
