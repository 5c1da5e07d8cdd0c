"""Base of all packages: dtypes, tensor records, byte sizes, name patterns, memory, system calls."""
