"""Converts tensor bytes: dtype casts, and decoding and encoding of quantized weights."""
