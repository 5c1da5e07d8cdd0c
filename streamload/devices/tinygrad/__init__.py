"""Devices of tinygrad."""
