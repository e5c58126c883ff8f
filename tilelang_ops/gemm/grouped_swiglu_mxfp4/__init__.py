"""Operator `grouped_swiglu_mxfp4`: see op.py for its meaning."""
