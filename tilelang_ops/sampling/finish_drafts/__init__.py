"""Operator `finish_drafts`: see op.py for its meaning."""
