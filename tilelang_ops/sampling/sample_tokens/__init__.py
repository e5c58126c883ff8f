"""Operator `sample_tokens`: see op.py for its meaning."""
