"""Models that are larger than their budget: layers stream through slots at every pass."""
