"""Where tensors go: one file a framework, imported only when asked for."""
