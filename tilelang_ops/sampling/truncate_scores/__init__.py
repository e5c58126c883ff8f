"""Operator `truncate_scores`: see op.py for its meaning."""
