"""How neighbors exchange messages, in memory and between Ray actors, without Flower.

What users import of it stands in `flwr_perdl.network`, above `flwr_perdl.strategies`.
"""
