"""What the SuperLink runs."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.strategies import PerMA, ServerSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn three shared atoms in two rounds, and save them."""
    settings = ServerSettings(node_timeout=300.0)  # seconds for all three sites to join
    strategy = PerMA(n_global=3, num_clients=3, fraction_evaluate=0.0, seed=1, server=settings)
    result = strategy.start(grid, num_rounds=2)
    (atoms,) = result.arrays.to_numpy_ndarrays()
    np.save(str(context.run_config["out"]), atoms)
    sites = sorted(strategy.history[-1].metrics)
    print(f"{len(atoms)} atoms of {atoms.shape[1]} columns, learned at the sites {sites}")
