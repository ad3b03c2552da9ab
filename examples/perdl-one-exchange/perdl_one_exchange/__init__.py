"""A frozen body, and heads in one exchange, with PyTorch: a Flower app."""
