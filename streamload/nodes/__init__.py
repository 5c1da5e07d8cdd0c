"""Nodes that load together: the group protocol, its engines, and how they were launched."""
