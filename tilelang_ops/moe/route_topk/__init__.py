"""Operator `route_topk`: see op.py for its meaning."""
