"""PerMA on three SuperNodes, each beside its own table."""
