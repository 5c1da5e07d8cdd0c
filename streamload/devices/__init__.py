"""Devices: one folder for a framework, imported when it is asked for."""
