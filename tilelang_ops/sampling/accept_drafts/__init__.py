"""Operator `accept_drafts`: see op.py for its meaning."""
