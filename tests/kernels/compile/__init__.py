"""Programs of the release model, one of every factory at least, compiled or lowered for every target."""
