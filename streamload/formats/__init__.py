"""Checkpoint file formats, a module for each; see `streamload.formats.reader`."""
