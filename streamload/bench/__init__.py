"""``streamload bench``: compare loaders of checkpoints, each in its own processes."""
