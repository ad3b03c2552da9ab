"""What runs at the server."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.strategies import PerMA

app = ServerApp()


def learn(grid: Grid) -> np.ndarray:
    """Return three atoms that the five sites share, and print what they explain at each site."""
    strategy = PerMA(n_global=3, num_clients=5, seed=1)
    result = strategy.start(grid, num_rounds=10)
    for site, measured in strategy.history[-1].metrics.items():
        alone, both = measured["mse_global"], measured["mse_full"]
        print(f"site {site}: error {alone:.2f} with the shared atoms, {both:.2f} with its own too")
    (atoms,) = result.arrays.to_numpy_ndarrays()
    return atoms


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn, and save the shared atoms."""
    np.save(str(context.run_config["out"]), learn(grid))
