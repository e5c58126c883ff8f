"""Operator `hash_ngrams`: see op.py for its meaning."""
