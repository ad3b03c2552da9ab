"""The server: PerMA instead of Flower's FedAvg."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.dictionary import dictionary_distance
from flwr_perdl.strategies import PerMA
from own_project.client_app import shared

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn the four atoms, and compare them with the true ones."""
    strategy = PerMA(n_global=4, num_clients=10, seed=1)
    result = strategy.start(grid, num_rounds=int(context.run_config["num-rounds"]))
    (atoms,) = result.arrays.to_numpy_ndarrays()
    print(f"distance from the shared atoms: {dictionary_distance(shared, atoms):.6f}")
