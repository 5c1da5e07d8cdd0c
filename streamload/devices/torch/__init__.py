"""Devices of torch."""
