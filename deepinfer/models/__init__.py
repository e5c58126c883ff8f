"""Models: what one offers the engine, and one folder for each family."""
