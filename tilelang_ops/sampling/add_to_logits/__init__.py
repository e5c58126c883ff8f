"""Operator `add_to_logits`: see op.py for its meaning."""
