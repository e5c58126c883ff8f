"""Operator `confidence_head`: see op.py for its meaning."""
