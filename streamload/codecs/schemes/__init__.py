"""Layouts of quantized weights, by library: recognize, decode, encode."""
