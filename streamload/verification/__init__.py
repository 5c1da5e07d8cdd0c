"""Compare loaded tensors and checkpoints with plain reads and numpy."""
