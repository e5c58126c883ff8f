"""Operator `grouped_linear_mxfp4`: see op.py for its meaning."""
