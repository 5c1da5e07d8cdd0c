"""Casting bytes of one dtype to another: one pass, rounded once, counted."""
