"""Operator `sum_smaller_probs`: see op.py for its meaning."""
