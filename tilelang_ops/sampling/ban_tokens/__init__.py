"""Operator `ban_tokens`: see op.py for its meaning."""
