"""Modules of transformers' quantizers."""
