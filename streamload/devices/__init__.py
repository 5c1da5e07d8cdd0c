"""Devices: one folder for each framework, imported on demand."""
