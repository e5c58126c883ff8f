"""Kernels of the indexer."""
