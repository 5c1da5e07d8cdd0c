"""What every room uses: dtypes, tensors and row ranges, units, patterns, memory, the system."""
