"""Tests of the C++ core: scripted traces of its policies, closed forms of its inputs, random traces."""
