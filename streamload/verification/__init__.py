"""Comparison of loaded tensors and of checkpoints with plain reads and numpy."""
