"""A PyTorch app in the shape of Flower's template."""
