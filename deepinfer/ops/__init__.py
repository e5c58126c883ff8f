"""Capabilities that the model calls, one file each; importing the room puts the CPU kernels in dispatch."""

from deepinfer.ops import index_scores, rows, sparse_attention

index_scores.register()
rows.register()
sparse_attention.register()
