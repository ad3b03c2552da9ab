"""LoRA adapters of a transformer, with PyTorch: a Flower app."""
