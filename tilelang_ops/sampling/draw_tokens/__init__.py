"""Operator `draw_tokens`: see op.py for its meaning."""
