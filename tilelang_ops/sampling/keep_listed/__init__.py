"""Operator `keep_listed`: see op.py for its meaning."""
