"""Operator `markov_step`: see op.py for its meaning."""
