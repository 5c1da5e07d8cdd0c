"""Bytes to values: casts, and the schemes of quantized weights."""
