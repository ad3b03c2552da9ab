"""ClusteredFedAvg with PyTorch: a Flower app."""
