"""Folders of weights for MLC-LLM."""
