"""What ``scripts/gpu`` does on a machine with a GPU."""
