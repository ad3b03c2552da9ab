"""A Flower app in the shape of Flower's quickstart."""
