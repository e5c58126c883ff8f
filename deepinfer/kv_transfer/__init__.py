"""State of sequences outside an engine: the KV store of prefixes, and the hand-off between two engines.

`store` is the interface that stores plug into, `memory_store` and `directory_store` are two of them, `prefix`
puts and loads whole prefixes; `connector` is the interface of hand-offs, `shared_memory` and
`store_connector` are two. The room handles bytes and numpy arrays and knows neither torch nor a scheduler.
"""
