"""Ways to drive an engine."""
