"""DiffusionAveraging with NumPy: a Flower app."""
