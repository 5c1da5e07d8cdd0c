"""The files that checkpoints are in: one file a format, see `streamload.formats.reader`."""
