"""Every program of the release model, compiled; a file for each architecture: they run side by side."""
