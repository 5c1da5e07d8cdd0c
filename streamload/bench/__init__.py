"""``streamload bench``: loaders of checkpoints side by side, each in processes of its own."""
