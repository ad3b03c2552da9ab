"""PerMA on tables of numbers: a Flower app."""
