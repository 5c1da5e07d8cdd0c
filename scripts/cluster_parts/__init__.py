"""Several hosts on this machine; see `scripts/cluster`."""
