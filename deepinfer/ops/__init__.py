"""Capabilities that the model calls, one file each; importing the room puts the CPU kernels in dispatch."""

from deepinfer.ops import rows, sparse_attention

rows.register()
sparse_attention.register()
