"""Operator `gather_dequantize`: see op.py for its meaning."""
