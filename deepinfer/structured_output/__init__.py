"""Structured output: what an output has to look like, checked before and enforced while it is generated."""
