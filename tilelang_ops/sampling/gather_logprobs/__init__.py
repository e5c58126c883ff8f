"""Operator `gather_logprobs`: see op.py for its meaning."""
