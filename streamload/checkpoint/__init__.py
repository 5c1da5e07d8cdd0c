"""Opens paths as a `Checkpoint`: headers, shards, variants, digests."""
