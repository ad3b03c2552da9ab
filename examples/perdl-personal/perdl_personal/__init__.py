"""PersonalizedFedAvg with PyTorch: a Flower app."""
