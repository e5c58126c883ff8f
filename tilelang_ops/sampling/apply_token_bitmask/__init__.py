"""Operator `apply_token_bitmask`: see op.py for its meaning."""
