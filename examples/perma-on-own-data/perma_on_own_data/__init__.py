"""PerMA on a table of one's own, as a Flower app."""
