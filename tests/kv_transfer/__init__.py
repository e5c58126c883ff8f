"""The KV store, its backends, and the hand-off of sequences between processes."""
