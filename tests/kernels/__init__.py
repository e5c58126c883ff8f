"""Kernels against the references of their operators."""
