"""DeepSeek-V4.1: configuration, weights and modules, one file each, named as in the checkpoint."""
