"""Operator `mix_coefficients`: see op.py for its meaning."""
