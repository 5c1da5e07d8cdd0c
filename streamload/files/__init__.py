"""Reads byte ranges of files by mmap, pread, direct I/O or HTTP, and detects changed files."""
