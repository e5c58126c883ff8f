"""Sampling: from logits to tokens, as a pure function of a row's logits, parameters, seed and index.

Importing the package loads nothing; `seeds` works without torch.
"""
