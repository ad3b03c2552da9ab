"""PerMA through Flower's SecAgg+."""
