"""Quantised weights: how they are stored, and a file for each format in which they are made."""
