"""Data: one device, one step at a time."""
