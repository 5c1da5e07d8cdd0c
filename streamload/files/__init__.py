"""Bytes of files: mapped, read, past the page cache, over HTTP; guarded against change."""
