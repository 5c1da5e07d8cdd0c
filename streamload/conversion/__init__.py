"""Checkpoint to checkpoint on disk: planned from headers, streamed once, published when whole."""
