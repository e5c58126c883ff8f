"""Serving sizes of every kernel family: what is timed, its result, the bytes and operations it takes."""
