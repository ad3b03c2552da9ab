"""The server, which receives the sum of the clients' updates."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.dictionary import dictionary_distance
from flwr_perdl.strategies import PerMA
from secure_aggregation.client_app import shared

app = ServerApp()


def learn(grid: Grid, secure: bool) -> None:
    """Learn the shared atoms, with secure sums or in the clear."""
    strategy = PerMA(n_global=4, secure=secure, num_clients=5, fraction_evaluate=0.0, seed=1)
    result = strategy.start(grid, num_rounds=3)
    (atoms,) = result.arrays.to_numpy_ndarrays()
    print(f"distance from the shared atoms: {dictionary_distance(shared, atoms):.2f}")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn on Flower."""
    learn(grid, secure=True)
