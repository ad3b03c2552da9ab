"""A Flower project with PerMA."""
