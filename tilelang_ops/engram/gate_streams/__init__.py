"""Operator `gate_streams`: see op.py for its meaning."""
