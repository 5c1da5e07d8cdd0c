"""The parts of ``scripts/bench``: what is measured, each in its own process, and the tables."""
