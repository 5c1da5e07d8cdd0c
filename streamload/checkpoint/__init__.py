"""A path becomes a `Checkpoint`: headers, shards, variants, digests."""
