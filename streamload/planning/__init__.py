"""Deciding, before anything moves, what goes where and how many bytes that takes."""
