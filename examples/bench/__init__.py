"""The parts of examples/benchmark.py: settings, prompts, what is measured, and how it is reported."""
