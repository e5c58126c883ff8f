"""Checkpoint files: tensors, tokenizer, and how a model is built from them."""
