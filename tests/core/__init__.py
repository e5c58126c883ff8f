"""Tests of the C++ core: policies by scripted traces, builders against a simple model, invariants by random traces."""
