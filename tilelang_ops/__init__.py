"""Operators with one meaning and several backends: a torch reference for CPUs, kernels for accelerators.

This package never imports `deepinfer`. Each operator lives in `tilelang_ops/<family>/<op>/`; its public
function is re-exported by the family.
"""
